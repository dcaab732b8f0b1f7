"""From a prompt as its row has it to one in which every image has its tokens, or to a drop that says why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_core.build import load_tokenizer
from miles_core.config import RunConfig
from miles_core.config.load import config_json
from miles_core.errors import DataError
from miles_core.reading import apart
from miles_core.stages.prompts import render
from miles_core.types import IMAGES, Drop, Prompt, images_of
from miles_vision import processor
from miles_vision.images import ImageStore, ImageUnusable, as_url, opened, read, sources


class Preparation:
    """Prepares the prompts of a run.

    Args:
        key: of a row's images.
        most: pixels of the largest image.
        store: where files are kept.
    """

    def __init__(self, config: RunConfig, key: str, most: int, store: ImageStore):
        self._config, self._key, self._most, self._store = config, key, most, store
        self._processor = processor.load(str(config.checkpoint.hf_checkpoint))
        self._tokenizer = load_tokenizer(config)
        self._token = processor.placeholders(config_json(config)[1] or {})[0]
        paths = {"train": config.rollout.prompt_data}
        paths |= {f"eval/{dataset['name']}": dataset["path"] for dataset in config.eval.every}
        self._folders = {stream: list(dict.fromkeys([Path.cwd(), Path(apart(str(path))[0]).resolve().parent]))
                         for stream, path in paths.items() if path}

    def __call__(self, prompt: Prompt) -> Prompt | Drop:
        """
        Raises:
            DataError: a conversation that ends with its answer: there is no prompt whose tokens could be kept.
        """
        if prompt.metadata.get(IMAGES) == [] or images_of(prompt):  # a group that goes on
            return prompt
        where = f"{prompt.stream} row {prompt.row}"
        if prompt.messages and prompt.messages[-1].get("role") == "assistant":
            raise DataError("the conversation with images ends with its answer", code="vision-answer-in-conversation",
                            who=where, fix="put the answer into a key of its own, and name it with --label-key or "
                            "--sft.sft-response-key")
        try:
            folders = self._folders.get(prompt.stream, [Path.cwd()])
            files = [read(source, folders, self._most) for source in sources(prompt.metadata.get(self._key))]
        except ImageUnusable as error:
            return Drop(error.reason, f"{where}: {error.detail}")
        shown = self._shown(replace(prompt, text=self._text(prompt, where)), files, where)
        if isinstance(shown, Prompt) and (size := len(shown.token_ids)) > self._limit(prompt.stream):
            return Drop("prompt_too_long", f"{where}: {size} tokens with those of its images")
        if isinstance(shown, Prompt) and prompt.messages:  # for who renders them once more, with tools
            return replace(shown, messages=tuple(processor.with_images(prompt.messages)))
        return shown

    def show(self, prompt: Prompt, images: Sequence[object]) -> Prompt | Drop:
        """See the hook show_images.

        Raises:
            DataError: an image that the prompt names is not in the run's folder.
        """
        where = f"{prompt.stream} row {prompt.row}, in a later turn" if images else f"{prompt.stream} row {prompt.row}"
        files = [self._store.get(name) for name in images_of(prompt)]
        try:
            files += [read(image, (), self._most) for image in images]
        except ImageUnusable as error:
            return Drop(error.reason, f"{where}: {error.detail}")
        return self._shown(prompt, files, where)

    def fill(self, messages: Sequence[Mapping[str, Any]], prompt: Prompt) -> list[dict[str, Any]]:
        """See the hook fill_images.

        Raises:
            DataError: an image that the prompt names is not in the run's folder.
        """
        files = iter([self._store.get(name) for name in images_of(prompt)])
        return [{**message, "content": [
            {"type": "image_url", "image_url": {"url": as_url(next(files))}} if part["type"] == "image" else part
            for part in message["content"]] if isinstance(message["content"], list) else message["content"]}
            for message in messages]

    def _shown(self, prompt: Prompt, files: Sequence[bytes], where: str) -> Prompt | Drop:
        """The prompt with the tokens of these files in its ids, and their names; its text has a token for each."""
        text = prompt.text
        marks = text.count(self._processor.image_token)
        if marks != len(files):
            return Drop("image_count", f"{where}: {len(files)} images, and {marks} marks in its text; write "
                        f"{processor.MARK} where each belongs")
        ids = prompt.token_ids if not files else processor.expanded(
            self._processor, text, [opened(data) for data in files], special=not self._templated)
        if files and ids[-1] == self._token:
            return Drop("image_last", f"{where}: the prompt ends with an image; let text follow it")
        if self._config.rollout.engine not in (None, "local") and processor.unexpanded(ids, self._token).count(
                self._token) != len(files):
            return Drop("images_touch", f"{where}: servers tell images apart by what stands between them")
        metadata = {key: value for key, value in prompt.metadata.items() if key != self._key}
        names = [self._store.put(data) for data in files]
        return replace(prompt, token_ids=ids, metadata=metadata | {IMAGES: names})

    @property
    def _templated(self) -> bool:
        return self._config.rollout.apply_chat_template

    def _text(self, prompt: Prompt, where: str) -> str:
        """The rendered text, with the processor's token once for each image."""
        if not self._templated:
            return prompt.text.replace(processor.MARK, self._processor.image_token)
        messages = processor.with_images(prompt.messages or [])
        return render(self._tokenizer, messages, self._config.rollout.apply_chat_template_kwargs or {}, where)

    def _limit(self, stream: str) -> int:
        rollout = self._config.rollout
        own = self._config.eval.eval_max_prompt_len if stream != "train" else None
        most = own or rollout.rollout_max_prompt_len
        context = (rollout.rollout_max_context_len or 0) - 1
        return min(most or context, context)
