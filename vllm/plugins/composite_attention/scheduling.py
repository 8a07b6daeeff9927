# SPDX-License-Identifier: Apache-2.0
"""A scheduler whose steps never end inside an image.

The queries of an image see all of its keys, so those must be computed in the same step. vLLM's
`disable_chunked_mm_input` does not hold for an image at which the step *starts*: with little of
the step's budget left it is cut all the same, and what is computed of it is wrong and stays. It
also asks for a whole video in one step, where only each of its frames attends both ways.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger(__name__)


class WholeImageScheduler(Scheduler):
    """vLLM's scheduler, which leaves an image for a later step rather than cutting it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make vLLM's scheduler.

        Raises:
            ValueError: the largest image of this model does not fit a step.
        """
        super().__init__(*args, **kwargs)
        speculative = self.vllm_config.speculative_config
        draft_slots = speculative.max_num_new_slots_for_drafting if speculative else 0
        self.largest_step = min(
            self.max_num_scheduled_tokens,
            self.scheduler_config.max_num_batched_tokens - draft_slots,
        )
        budget = MultiModalBudget(self.vllm_config, MULTIMODAL_REGISTRY)
        image = budget.mm_max_toks_per_item.get("image", 0)
        if image > self.largest_step:
            raise ValueError(
                f"An image of this model takes up to {image} tokens that attend both ways, and a "
                f"step of the scheduler takes {self.largest_step}: raise --max-num-batched-tokens "
                f"(or max_num_scheduled_tokens) to {image + draft_slots} or more."
            )

    def _try_schedule_encoder_inputs(
        self,
        request: Any,
        num_computed_tokens: int,
        num_new_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        end = num_computed_tokens + num_new_tokens
        in_prompt = request.has_encoder_inputs and end < request.num_prompt_tokens
        for feature in request.mm_features if in_prompt else ():
            position = feature.mm_position
            if not position.offset < end < position.offset + position.length:
                continue  # most of them, told without a look at their tokens
            if feature.modality not in ("image", "video"):
                continue
            for start, stop in position.extract_embeds_range():
                if not start < end <= stop:
                    continue
                first = max(start, num_computed_tokens)
                if stop + 1 - first > self.largest_step:
                    logger.error_once(
                        "An image of %d tokens does not fit a step of %d: it is cut, and its first "
                        "part will not see its last. Raise --max-num-batched-tokens.",
                        stop + 1 - start,
                        self.largest_step,
                    )
                else:  # at a start already computed (a prefix cache hit) nothing is scheduled
                    num_new_tokens = first - num_computed_tokens
        return super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, *args, **kwargs
        )
