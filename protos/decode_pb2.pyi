import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from paceline.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RetargetTo(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETARGET_TO_UNSPECIFIED: _ClassVar[RetargetTo]
    RETARGET_TO_REMOTE: _ClassVar[RetargetTo]
    RETARGET_TO_LOCAL: _ClassVar[RetargetTo]
RETARGET_TO_UNSPECIFIED: RetargetTo
RETARGET_TO_REMOTE: RetargetTo
RETARGET_TO_LOCAL: RetargetTo

class DecodeGenerateRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "reservation_id", "prompt", "sampling", "local", "timeout", "priority", "cache_salt", "token_stream")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STREAM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    reservation_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    local: bool
    timeout: _duration_pb2.Duration
    priority: int
    cache_salt: str
    token_stream: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reservation_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., local: _Optional[bool] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., token_stream: _Optional[str] = ...) -> None: ...

class DecodeGenerateResponse(_message.Message):
    __slots__ = ("reserved", "tokens", "finish", "retargeted", "choice_finish")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    RETARGETED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FINISH_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    tokens: Tokens
    finish: DecodeFinish
    retargeted: Retargeted
    choice_finish: ChoiceFinish
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finish: _Optional[_Union[DecodeFinish, _Mapping]] = ..., retargeted: _Optional[_Union[Retargeted, _Mapping]] = ..., choice_finish: _Optional[_Union[ChoiceFinish, _Mapping]] = ...) -> None: ...

class StreamTokensRequest(_message.Message):
    __slots__ = ("token_stream", "epoch")
    TOKEN_STREAM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    token_stream: str
    epoch: int
    def __init__(self, token_stream: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class StreamTokensResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[RequestAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[RequestAnswer, _Mapping]]] = ...) -> None: ...

class RequestAnswer(_message.Message):
    __slots__ = ("reservation_id", "answer")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    answer: DecodeGenerateResponse
    def __init__(self, reservation_id: _Optional[str] = ..., answer: _Optional[_Union[DecodeGenerateResponse, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("attempt", "load")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    load: _common_pb2.Load
    def __init__(self, attempt: _Optional[int] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ...) -> None: ...

class Retargeted(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    def __init__(self, attempt: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("ids", "index", "logprobs", "choice", "prompt_logprobs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    choice: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., choice: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class ChoiceFinish(_message.Message):
    __slots__ = ("choice", "reason", "completion_tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    reason: _common_pb2.FinishReason
    completion_tokens: int
    def __init__(self, choice: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class DecodeFinish(_message.Message):
    __slots__ = ("reason", "completion_tokens", "prompt_tokens_computed", "transfer", "load", "attempts", "cached_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    completion_tokens: int
    prompt_tokens_computed: int
    transfer: _common_pb2.Transfer
    load: _common_pb2.Load
    attempts: int
    cached_tokens: int
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., completion_tokens: _Optional[int] = ..., prompt_tokens_computed: _Optional[int] = ..., transfer: _Optional[_Union[_common_pb2.Transfer, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., attempts: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ClaimWriteRequest(_message.Message):
    __slots__ = ("reservation_id", "attempt", "decode_epoch", "writer", "claim_token", "fingerprint")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    CLAIM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    attempt: int
    decode_epoch: int
    writer: _common_pb2.WorkerKey
    claim_token: bytes
    fingerprint: _common_pb2.Fingerprint
    def __init__(self, reservation_id: _Optional[str] = ..., attempt: _Optional[int] = ..., decode_epoch: _Optional[int] = ..., writer: _Optional[_Union[_common_pb2.WorkerKey, _Mapping]] = ..., claim_token: _Optional[bytes] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ...) -> None: ...

class ClaimWriteResponse(_message.Message):
    __slots__ = ("blocks", "held_tokens", "agent", "load", "fingerprint")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    held_tokens: int
    agent: bytes
    load: _common_pb2.Load
    fingerprint: _common_pb2.Fingerprint
    def __init__(self, blocks: _Optional[_Iterable[int]] = ..., held_tokens: _Optional[int] = ..., agent: _Optional[bytes] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ...) -> None: ...

class RetargetRequest(_message.Message):
    __slots__ = ("reservation_id", "attempt", "to")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    attempt: int
    to: RetargetTo
    def __init__(self, reservation_id: _Optional[str] = ..., attempt: _Optional[int] = ..., to: _Optional[_Union[RetargetTo, str]] = ...) -> None: ...

class RetargetResponse(_message.Message):
    __slots__ = ("attempt", "local", "already_landed", "load")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    ALREADY_LANDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    local: bool
    already_landed: bool
    load: _common_pb2.Load
    def __init__(self, attempt: _Optional[int] = ..., local: _Optional[bool] = ..., already_landed: _Optional[bool] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ...) -> None: ...

class DecodeAbortRequest(_message.Message):
    __slots__ = ("reservation_id", "choice")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    choice: int
    def __init__(self, reservation_id: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class DecodeAbortResponse(_message.Message):
    __slots__ = ("found", "load")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    found: bool
    load: _common_pb2.Load
    def __init__(self, found: _Optional[bool] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ...) -> None: ...

class DecodeGetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeGetLoadsResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _common_pb2.Load
    def __init__(self, load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ...) -> None: ...

class DecodeGetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeGetServerInfoResponse(_message.Message):
    __slots__ = ("server",)
    SERVER_FIELD_NUMBER: _ClassVar[int]
    server: _common_pb2.ServerInfo
    def __init__(self, server: _Optional[_Union[_common_pb2.ServerInfo, _Mapping]] = ...) -> None: ...

class DecodeSubscribeKvEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeSubscribeKvEventsResponse(_message.Message):
    __slots__ = ("event", "epoch")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    event: _common_pb2.KvEvent
    epoch: int
    def __init__(self, event: _Optional[_Union[_common_pb2.KvEvent, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class DecodeDrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeDrainResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _common_pb2.Load
    def __init__(self, load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ...) -> None: ...
