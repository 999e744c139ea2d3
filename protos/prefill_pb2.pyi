import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from paceline.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "prompt", "sampling", "reservation_id", "attempt", "decode", "timeout", "priority", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    reservation_id: str
    attempt: int
    decode: _common_pb2.Peer
    timeout: _duration_pb2.Duration
    priority: int
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., reservation_id: _Optional[str] = ..., attempt: _Optional[int] = ..., decode: _Optional[_Union[_common_pb2.Peer, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("tokens", "finish", "load", "duration", "cached_tokens", "logprobs", "transfer", "prompt_logprobs", "finishes")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish: _common_pb2.FinishReason
    load: _common_pb2.Load
    duration: _duration_pb2.Duration
    cached_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    transfer: _common_pb2.Transfer
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    finishes: _containers.RepeatedScalarFieldContainer[_common_pb2.FinishReason]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., transfer: _Optional[_Union[_common_pb2.Transfer, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., finishes: _Optional[_Iterable[_Union[_common_pb2.FinishReason, str]]] = ...) -> None: ...

class PrefillAbortRequest(_message.Message):
    __slots__ = ("reservation_id", "attempt", "epoch")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    attempt: int
    epoch: int
    def __init__(self, reservation_id: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class PrefillAbortResponse(_message.Message):
    __slots__ = ("epoch", "found", "load", "lock_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOCK_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    found: bool
    load: _common_pb2.Load
    lock_id: str
    def __init__(self, epoch: _Optional[int] = ..., found: _Optional[bool] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., lock_id: _Optional[str] = ...) -> None: ...

class PrefillGetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillGetLoadsResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _common_pb2.Load
    def __init__(self, load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ...) -> None: ...

class PrefillGetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillGetServerInfoResponse(_message.Message):
    __slots__ = ("server",)
    SERVER_FIELD_NUMBER: _ClassVar[int]
    server: _common_pb2.ServerInfo
    def __init__(self, server: _Optional[_Union[_common_pb2.ServerInfo, _Mapping]] = ...) -> None: ...

class PrefillSubscribeKvEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillSubscribeKvEventsResponse(_message.Message):
    __slots__ = ("event", "epoch")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    event: _common_pb2.KvEvent
    epoch: int
    def __init__(self, event: _Optional[_Union[_common_pb2.KvEvent, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class PrefillDrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillDrainResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _common_pb2.Load
    def __init__(self, load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ...) -> None: ...
