"""TRL's GRPOTrainer as both scripts here measure it: the step alone, with its generations clocked."""

from __future__ import annotations

from collections.abc import Callable


def trainer_class(clock: Callable[[], float]):
    """GRPOTrainer that counts its generations, their tokens, and what they take by a clock."""
    from trl import GRPOTrainer

    class Clocked(GRPOTrainer):
        generations, generated_tokens, generation_s = 0, 0, 0.0

        def _generate_single_turn(self, *positional, **keywords):
            begin = clock()
            result = super()._generate_single_turn(*positional, **keywords)
            self.generation_s += clock() - begin
            self.generations += 1
            self.generated_tokens += sum(len(ids) for ids in result[0])
            return result

    return Clocked


def config(out: str, *, samples: int, micro_batch: int, cache: str, **own):
    """GRPOConfig of one optimizer step for each generation, with everything that is not the step itself switched off.

    Args:
        samples: answers of a step.
        cache: of generate, "static" or "dynamic".
        own: what the scripts set differently.
    """
    from trl import GRPOConfig

    accumulation = samples // micro_batch
    return GRPOConfig(
        output_dir=out, gradient_checkpointing=False, disable_dropout=True, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation, steps_per_generation=accumulation, num_iterations=1,
        temperature=1.0, top_p=1.0, top_k=0, cache_implementation=None if cache == "dynamic" else cache,
        epsilon=0.2, epsilon_high=0.28, learning_rate=1e-6, lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=1.0, logging_strategy="no", save_strategy="no", eval_strategy="no", report_to=[],
        disable_tqdm=True, shuffle_dataset=False, **own,
    )  # fmt: skip
