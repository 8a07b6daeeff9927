# SPDX-License-Identifier: Apache-2.0
"""A scheduler whose steps never end inside an image.

The queries of an image see all of its keys, so those must be computed in the same step. vLLM's
`disable_chunked_mm_input` does not hold for an image at which the step *starts*: with little of
the step's budget left it is cut all the same, and what is computed of it is wrong and stays.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class WholeImageScheduler(Scheduler):
    """vLLM's scheduler, which leaves an image for a later step rather than cutting it."""

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
            if feature.modality not in ("image", "video"):
                continue
            for start, stop in feature.mm_position.extract_embeds_range():
                if start < end <= stop:
                    # At a start already computed (a prefix cache hit) nothing is scheduled.
                    num_new_tokens = max(start - num_computed_tokens, 0)
        return super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, *args, **kwargs
        )
