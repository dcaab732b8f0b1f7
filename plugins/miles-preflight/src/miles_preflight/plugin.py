"""The plugin: its checks in order, what it adds to a plan, and its command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from miles_core.config import RunConfig
    from miles_core.plugins.select import Selected


class Preflight:
    """Looks at data, chat template and checkpoint files before a run starts, and refuses what would go wrong unseen."""

    default = True

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None], plugins: Sequence[Selected]) -> RunConfig:
        from miles_core.config.load import with_values
        from miles_preflight.checkpoint_files import check_files
        from miles_preflight.lengths import check_lengths
        from miles_preflight.machine import check_gpus, check_listening
        from miles_preflight.paths import check_paths, check_weights
        from miles_preflight.rows import begun, check_rows
        from miles_preflight.settings import check_settings
        from miles_preflight.silent import check_silent
        from miles_preflight.statements import check_statements
        from miles_preflight.tokenizer import check_tokenizer
        from miles_preflight.unread import unread

        if (paths := config.checkpoint).load is not None and paths.load == paths.hf_checkpoint != paths.save:
            note("--load names the Hugging Face folder of --hf-checkpoint: the run starts from it")
            if paths.ref_load in (None, paths.load):  # from any other --ref-load a trainer would start
                config = with_values(config, "the folder of --hf-checkpoint", checkpoint__load=None)
        check_silent(config)
        check_settings(config, note)
        check_paths(config, note)
        check_files(config)
        check_tokenizer(config, note)
        check_lengths(config)
        files = begun(plugins, config, note)
        check_rows(config, files, note)
        check_gpus(config)
        check_statements(plugins, config, files)
        check_weights(config, note)
        check_listening(config)  # last: it opens connections
        for text in unread(config, plugins):
            note(text)
        return config

    @hookimpl
    def plan_lines(self, config: RunConfig, plugins: Sequence[Selected]) -> Iterable[tuple[str, str]]:
        from miles_preflight.precision import lines

        return [("precision", line) for line in lines(config, plugins)]

    @hookimpl("commands", name="check-template")
    def check_template(self) -> click.Command:
        """Check a chat template by the token ids that it gives."""
        from miles_preflight.commands.check_template import command

        return command
