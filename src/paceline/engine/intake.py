"""What a request must be to be taken in: one that would fail in the middle of a batch takes its neighbours with it."""

from __future__ import annotations

from paceline.engine.memory import Memory
from paceline.engine.request import EngineRequest
from paceline.engine.scheduler import Scheduler
from paceline.errors import EngineError
from paceline.types import Limits, blocks_for, blocks_in_groups


def check_request(request: EngineRequest, scheduler: Scheduler, memory: Memory, limits: Limits) -> None:
    """Raises `EngineError` for a request that contradicts itself, or whose lease has less than it needs."""
    name = f"request {request.request_id}"
    known = request.proposes and not request.hold and request.computed == len(request.tokens)
    if not (0 <= request.computed < len(request.tokens) or known) or request.num_prompt == 0:
        raise EngineError(
            f"{name} has {request.computed} of {len(request.tokens)} tokens computed: nothing to sample from"
        )
    if request.fanout > 1 and not (request.hold and request.stop_after == 1 and request.num_output == 0):
        raise EngineError(f"{name} fans out to {request.fanout} choices and doesn't end there")
    if request.proposes and (request.sampling.logprobs is None or request.hold != (request.stop_after == 1)):
        raise EngineError(f"{name} proposes an unknown number of tokens, or neither holds nor goes on")
    last_output = request.sampling.max_tokens if request.stop_after is None else request.stop_after
    if request.num_output and (scheduler.finish_reason(request) or request.num_output >= last_output):
        raise EngineError(f"{name} has ended with the output it came with")
    if not _holds_enough(request, memory):
        stored = request.stored_at_end if request.hold else request.computed
        needed = blocks_in_groups(stored, limits.most_blocks)
        raise EngineError(f"{name} needs {needed} KV blocks and was lent {len(request.lease)}")
    at_end = blocks_in_groups(request.stored_at_end, limits.most_blocks)
    if at_end > limits.pool_blocks:
        raise EngineError(f"{name} needs {at_end} KV blocks to its end, and the pool has {limits.pool_blocks}")


def _holds_enough(request: EngineRequest, memory: Memory) -> bool:
    if request.hold and not memory.holds(request.lease, blocks_for(request.stored_at_end)):
        return False
    return request.lease.reach >= blocks_for(request.computed)
