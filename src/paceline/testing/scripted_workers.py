"""Prefill and decode workers that do what a test tells them, over real gRPC: twins for the router's tests.

async with scripted_decode("d0") as decode:
    call = await decode.next_call()
    await call.reserve()
    await call.tokens(0, [5, 6])
    await call.finish()
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from paceline import wire
from paceline.errors import PacelineError, StaleEpoch
from paceline.protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from paceline.types import BLOCK_TOKENS, FinishReason, Role, WorkerKey, WorkerLoad

PATIENCE_S: Final = 10.0
"""Bound on each wait of a test: liveness, not speed."""

OnRetarget = Callable[[decode_pb2.RetargetRequest], Awaitable[decode_pb2.RetargetResponse]]
Context = grpc.aio.ServicerContext[Any, Any]


class _Call:
    """One call in a worker's hands, driven from outside: what is done to it is queued, and the handler does it."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()  # by the router, before the call ended
        self._acts: asyncio.Queue[Message | PacelineError | None] = asyncio.Queue()

    async def fail(self, error: PacelineError) -> None:
        """Ends the call with `error`."""
        self._acts.put_nowait(error)

    async def seen_cancelled(self) -> None:
        """Returns once the router has cancelled the call; TimeoutError where it does not."""
        async with asyncio.timeout(PATIENCE_S):
            await self.cancelled.wait()


class PrefillCall(_Call):
    """A Prefill call."""

    def __init__(self, request: prefill_pb2.PrefillRequest, load: WorkerLoad) -> None:
        super().__init__()
        self.request = request
        self._load = load

    async def reply(
        self,
        tokens: list[int],
        *,
        finish: FinishReason | None = None,
        cached_tokens: int = 0,
        prompt_logprobs: Sequence[float] = (),
    ) -> None:
        """Ends the call with the first tokens, and log-probabilities of the prompt's from the second on."""
        scored = zip(self.request.prompt[1:], prompt_logprobs, strict=bool(prompt_logprobs))
        self._acts.put_nowait(
            prefill_pb2.PrefillResponse(
                tokens=tokens,
                finish=wire.finish_to_proto(finish),
                cached_tokens=cached_tokens,
                prompt_logprobs=[common_pb2.TokenLogprob(token_id=each, logprob=value) for each, value in scored],
                duration=wire.duration(0.25),
                transfer=common_pb2.Transfer(blocks=2, bytes=200, parts=1, parts_before_last_chunk=1),
                load=wire.load_to_proto(self._load),
            )
        )

    async def run(self, context: Context) -> prefill_pb2.PrefillResponse:
        """The handler's body."""
        try:
            act = await self._acts.get()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if isinstance(act, PacelineError):
            await wire.abort(context, act)
        assert isinstance(act, prefill_pb2.PrefillResponse)
        return act


class DecodeCall(_Call):
    """A Decode.Generate call."""

    def __init__(self, request: decode_pb2.DecodeGenerateRequest, load: WorkerLoad) -> None:
        super().__init__()
        self.request = request
        self._load = load
        self._told: Counter[int] = Counter()  # by choice

    async def reserve(self) -> None:
        """Says that the room is there."""
        reserved = decode_pb2.Reserved(attempt=1, load=wire.load_to_proto(self._load))
        self._acts.put_nowait(decode_pb2.DecodeGenerateResponse(reserved=reserved))

    async def tokens(self, index: int, ids: list[int], *, choice: int = 0, logprobs: Sequence[float] = ()) -> None:
        """Sends tokens."""
        self._told[choice] = max(self._told[choice], index + len(ids))
        scored = [
            common_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in zip(ids, logprobs, strict=bool(logprobs))
        ]
        tokens = decode_pb2.Tokens(ids=ids, index=index, choice=choice, logprobs=scored)
        self._acts.put_nowait(decode_pb2.DecodeGenerateResponse(tokens=tokens))

    async def finish_choice(self, choice: int, reason: FinishReason = FinishReason.LENGTH) -> None:
        """Ends one of several choices."""
        ended = decode_pb2.ChoiceFinish(
            choice=choice, reason=wire.finish_to_proto(reason), completion_tokens=self._told[choice]
        )
        self._acts.put_nowait(decode_pb2.DecodeGenerateResponse(choice_finish=ended))

    async def retargeted(self, attempt: int | None) -> None:
        """Says that it gave the attempt up."""
        said = decode_pb2.Retargeted(attempt=attempt)
        self._acts.put_nowait(decode_pb2.DecodeGenerateResponse(retargeted=said))

    async def finish(
        self,
        reason: FinishReason = FinishReason.LENGTH,
        *,
        prompt_tokens_computed: int = 0,
        cached_tokens: int = 0,
        attempts: int = 1,
    ) -> None:
        """Ends the stream as a worker does."""
        finish = decode_pb2.DecodeFinish(
            reason=wire.finish_to_proto(reason),
            completion_tokens=self._told.total(),
            prompt_tokens_computed=prompt_tokens_computed,
            cached_tokens=cached_tokens,
            transfer=common_pb2.Transfer(
                blocks=3, bytes=300, parts=2, duration=wire.duration(0.5), held_blocks=cached_tokens // BLOCK_TOKENS
            ),
            load=wire.load_to_proto(self._load),
            attempts=attempts,
        )
        self._acts.put_nowait(decode_pb2.DecodeGenerateResponse(finish=finish))
        self._acts.put_nowait(None)

    async def end(self) -> None:
        """Ends the stream with nothing said."""
        self._acts.put_nowait(None)

    async def run(self, context: Context) -> None:
        """The handler's body."""
        try:
            while (act := await self._acts.get()) is not None:
                if isinstance(act, PacelineError):
                    await wire.abort(context, act)
                await context.write(act)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class _Worker:
    """What both tiers share: a server, a key, and calls to hand to the test."""

    role: Role

    def __init__(self, worker_id: str, *, epoch: int, pool_blocks: int, model: str, dtype: str) -> None:
        self.key = WorkerKey(worker_id, epoch)
        self.model = model
        self.pool_blocks = pool_blocks
        self.context_tokens = 2_048
        self.load = WorkerLoad(total_blocks=pool_blocks, free_blocks=pool_blocks)
        self.port = 0
        self.claim_token = f"token of {self.key}".encode()
        self.hangs = False  # it answers no question about itself any more
        self._dtype = dtype
        self._server = grpc.aio.server(options=wire.SERVER_OPTIONS)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def info(self) -> common_pb2.WorkerInfo:
        """What it registers with."""
        return common_pb2.WorkerInfo(
            worker=wire.key_to_proto(self.key),
            role=wire.role_to_proto(self.role),
            address=self.address,
            model=self.model,
            limits=common_pb2.Limits(vocab_size=512, context_tokens=self.context_tokens, pool_blocks=self.pool_blocks),
            fingerprint=common_pb2.Fingerprint(
                format_version=1, model=self.model, dtype=self._dtype, block_tokens=BLOCK_TOKENS
            ),
            eos_token_ids=[2],
            lock_id=f"lock of {self.key.worker_id}",
            claim_token=self.claim_token,
        )

    async def start(self) -> None:
        """Binds a free port and serves."""
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def server_info(self) -> common_pb2.ServerInfo:
        """What GetServerInfo answers, where it does."""
        if self.hangs:
            await asyncio.Event().wait()
        return common_pb2.ServerInfo(role=wire.role_to_proto(self.role), worker=wire.key_to_proto(self.key))

    async def die(self) -> None:
        """Closes every connection at once. A second call does nothing."""
        await self._server.stop(None)

    def _admit(self, epoch: int) -> None:
        if epoch != self.key.epoch:
            raise StaleEpoch(f"this is {self.key}, and epoch {epoch} was meant")


class ScriptedPrefill(_Worker, prefill_pb2_grpc.PrefillServicer):
    """A prefill worker."""

    role = Role.PREFILL

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.calls: asyncio.Queue[PrefillCall] = asyncio.Queue()
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, self._server)

    async def next_call(self) -> PrefillCall:
        """The next Prefill call to arrive."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.calls.get()

    @property
    def idle(self) -> bool:
        """True where no call waits to be taken."""
        return self.calls.empty()

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillResponse:
        """Hands the call to the test."""
        async with wire.answering_errors(context):
            self._admit(request.epoch)
        call = PrefillCall(request, self.load)
        self.calls.put_nowait(call)
        return await call.run(context)

    async def GetServerInfo(
        self, _request: prefill_pb2.PrefillGetServerInfoRequest, _context: Context
    ) -> prefill_pb2.PrefillGetServerInfoResponse:
        """Who this is."""
        return prefill_pb2.PrefillGetServerInfoResponse(server=await self.server_info())


class ScriptedDecode(_Worker, decode_pb2_grpc.DecodeServicer):
    """A decode worker. `on_retarget` answers Retarget; by default, that the worker computes the prompt itself."""

    role = Role.DECODE

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.calls: asyncio.Queue[DecodeCall] = asyncio.Queue()
        self.retargets: asyncio.Queue[decode_pb2.RetargetRequest] = asyncio.Queue()
        self.aborted: asyncio.Queue[str] = asyncio.Queue()
        self.aborted_choices: asyncio.Queue[int] = asyncio.Queue()
        self.on_retarget: OnRetarget = _local
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self._server)

    async def next_call(self) -> DecodeCall:
        """The next Generate call to arrive."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.calls.get()

    @property
    def idle(self) -> bool:
        """True where no call waits to be taken."""
        return self.calls.empty()

    async def next_retarget(self) -> decode_pb2.RetargetRequest:
        """The next Retarget call to arrive."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.retargets.get()

    async def Generate(self, request: decode_pb2.DecodeGenerateRequest, context: Context) -> None:
        """Hands the call to the test."""
        async with wire.answering_errors(context):
            self._admit(request.epoch)
        call = DecodeCall(request, self.load)
        self.calls.put_nowait(call)
        await call.run(context)

    async def GetServerInfo(
        self, _request: decode_pb2.DecodeGetServerInfoRequest, _context: Context
    ) -> decode_pb2.DecodeGetServerInfoResponse:
        """Who this is."""
        return decode_pb2.DecodeGetServerInfoResponse(server=await self.server_info())

    async def Retarget(self, request: decode_pb2.RetargetRequest, context: Context) -> decode_pb2.RetargetResponse:
        """Notes the call and answers as the test said."""
        self.retargets.put_nowait(request)
        async with wire.answering_errors(context):
            return await self.on_retarget(request)

    async def Abort(self, request: decode_pb2.DecodeAbortRequest, context: Context) -> decode_pb2.DecodeAbortResponse:
        """Notes the call."""
        if request.HasField("choice"):
            self.aborted_choices.put_nowait(request.choice)
        else:
            self.aborted.put_nowait(request.reservation_id)
        return decode_pb2.DecodeAbortResponse(found=True)


async def _local(_request: decode_pb2.RetargetRequest) -> decode_pb2.RetargetResponse:
    return decode_pb2.RetargetResponse(local=True)


@asynccontextmanager
async def scripted_prefill(
    worker_id: str, *, epoch: int = 1, pool_blocks: int = 128, model: str = "dummy:tiny", dtype: str = "float32"
) -> AsyncIterator[ScriptedPrefill]:
    """A prefill worker that serves until the block ends."""
    worker = ScriptedPrefill(worker_id, epoch=epoch, pool_blocks=pool_blocks, model=model, dtype=dtype)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.die()


@asynccontextmanager
async def scripted_decode(
    worker_id: str, *, epoch: int = 1, pool_blocks: int = 128, model: str = "dummy:tiny", dtype: str = "float32"
) -> AsyncIterator[ScriptedDecode]:
    """A decode worker that serves until the block ends."""
    worker = ScriptedDecode(worker_id, epoch=epoch, pool_blocks=pool_blocks, model=model, dtype=dtype)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.die()
