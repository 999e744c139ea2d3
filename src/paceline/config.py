"""Settings of every role: frozen, typed, read once at the entry point. Nothing else reads the environment.

Precedence, lowest first: the default, the TOML file, the environment (`PACELINE_QUEUE_SIZE=100`), the flag
(`--queue-size 100`). In the file a key at the top level is for every role that knows it, and a table named after a role
(`[router]`, `[prefill]`, `[decode]`, `[up]`) is for that role alone and wins over the top level.

    parser = argparse.ArgumentParser()
    add_flags(parser, RouterConfig)
    config = load(RouterConfig, file=None, env=os.environ, flags=vars(parser.parse_args()))

How the sources are merged and checked is in `paceline.settings`.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from paceline.errors import ConfigError, quote
from paceline.settings import add_flags, flags_for, merge

__all__ = [
    "CommonConfig",
    "DecodeConfig",
    "EngineConfig",
    "PrefillConfig",
    "RouterConfig",
    "UpConfig",
    "WorkerConfig",
    "add_flags",
    "advertised_address",
    "default_cache_dir",
    "default_run_dir",
    "ensure_run_dir",
    "flags_for",
    "load",
    "parse_address",
    "worker_name",
]

DEFAULT_MODEL: Final = "smollm2-135m-instruct"

_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?\]")
"""A name, an IPv4 address, or an IPv6 address in brackets: nothing that gRPC takes for a scheme, or for several."""
_PORT: Final = re.compile(r"[0-9]{1,5}")
_DEVICE: Final = re.compile(r"cpu|cuda:[0-9]+")

C = TypeVar("C", bound="CommonConfig")


def default_cache_dir(env: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/paceline`, else `~/.cache/paceline`."""
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def default_run_dir(env: Mapping[str, str]) -> Path:
    """`$XDG_RUNTIME_DIR/paceline`, else `/tmp/paceline-UID`."""
    base = env.get("XDG_RUNTIME_DIR")
    return Path(base) / "paceline" if base else Path(f"/tmp/paceline-{os.getuid()}")


class CommonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every role has. Ports of 0 mean a free one; times are in seconds."""

    host: Annotated[str, Meta(description="Address to listen on", min_length=1)] = "127.0.0.1"
    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Port of the Prometheus endpoint; 0 takes a free one, none turns it off"),
    ] = 0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level that is logged")
    ] = "info"
    log_json: Annotated[bool | None, Meta(description="JSON logs; unset: JSON unless stderr is a terminal")] = None
    model: Annotated[
        str,
        Meta(description="Model to serve: a known name, a GGUF file, a Hugging Face folder or hub id", min_length=1),
    ] = DEFAULT_MODEL
    cache_dir: Annotated[
        Path,
        Meta(description="Where fetched models are kept; $XDG_CACHE_HOME/paceline or ~/.cache/paceline unless set"),
    ] = msgspec.field(default_factory=lambda: default_cache_dir(os.environ))
    run_dir: Annotated[
        Path,
        Meta(description="Where start locks lie (0700); $XDG_RUNTIME_DIR/paceline or /tmp/paceline-UID unless set"),
    ] = msgspec.field(default_factory=lambda: default_run_dir(os.environ))
    offline: Annotated[bool, Meta(description="Never fetch: a model that is not cached is an error")] = False
    grace_s: Annotated[
        float, Meta(description="Seconds that work in hand gets to finish after SIGTERM", ge=0, le=3600)
    ] = 30.0


class RouterConfig(CommonConfig, frozen=True, kw_only=True):
    """The router's settings."""

    port: Annotated[int, Meta(description="gRPC port", ge=0, le=65535)] = 7070
    queue_size: Annotated[int, Meta(description="Requests that may wait for a worker", ge=0)] = 512
    queue_timeout_s: Annotated[float, Meta(description="Longest wait in the queue, in seconds", gt=0)] = 30.0
    heartbeat_s: Annotated[
        float, Meta(description="Seconds between a worker's heart-beats, as the router asks for", ge=0.1, le=60)
    ] = 1.0
    lease_s: Annotated[
        float, Meta(description="Seconds without a heart-beat after which a worker gets no new work", ge=0.2, le=600)
    ] = 5.0
    local_prefill_below: Annotated[
        int, Meta(description="Prompts with fewer tokens than this to compute are prefilled on the decode worker", ge=0)
    ] = 0
    local_prefill: Annotated[
        Literal["auto", "always", "never"],
        Meta(description="Whether prompts go to decode workers: auto does where no prefill worker is alive"),
    ] = "auto"
    prefill_slots: Annotated[
        int, Meta(description="Requests in one prefill worker's hands at most; more wait in the queue", ge=1)
    ] = 8
    context_tokens: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="Longest prompt + answer, in tokens; none: the model's own"),
    ] = None
    request_timeout_s: Annotated[
        float, Meta(description="Seconds a request may take that names no timeout", gt=0, le=86400)
    ] = 600.0
    max_unacked_tokens: Annotated[
        int, Meta(description="Tokens a client may be behind before its request is cancelled as too slow", ge=1)
    ] = 4096

    def __post_init__(self) -> None:
        """Raises ConfigError where two settings contradict each other."""
        if self.lease_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"lease_s: {self.lease_s} is under the limit of twice heartbeat_s, {2 * self.heartbeat_s}: "
                f"one late heart-beat would take a worker out"
            )


class EngineConfig(CommonConfig, frozen=True, kw_only=True):
    """What every engine has, whichever the tier."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Number format of weights and KV; auto: bfloat16 on a GPU, float32 on a CPU"),
    ] = "auto"
    device: Annotated[
        str | None, Meta(description="cpu, or cuda:N for GPU N; none: cpu, unless cuda_index names a GPU")
    ] = None
    cuda_index: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="GPU to compute on; short for --device cuda:N")
    ] = None
    pool_blocks: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(
            description="KV blocks in the pool, of 16 tokens in all layers; "
            "none: 1024, on a GPU what memory_fraction leaves"
        ),
    ] = None
    memory_fraction: Annotated[
        float, Meta(description="Share of the GPU's memory for weights, work and the KV pool together", gt=0, le=1)
    ] = 0.9
    context_tokens: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="Longest prompt + answer, in tokens; none: the model's own"),
    ] = None
    max_batch_tokens: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(
            description="Token budget of one step; a longer prompt is computed in chunks; none: 512, "
            "and 1024 where a GPU only prefills"
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        Meta(
            description="On a GPU, fix the order of every sum: a request's tokens are the same alone and in any batch, "
            "at some cost in speed"
        ),
    ] = False
    prefix_cache: Annotated[bool, Meta(description="Keep the KV of full blocks to be found by later prompts")] = True
    max_running: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Requests in one batch at most; none: 64, and 256 on a GPU"),
    ] = None
    max_waiting: Annotated[int, Meta(description="Requests accepted beyond the batch before refusing", ge=0)] = 256
    transport: Annotated[
        Literal["auto", "nixl", "cuda_ipc", "ucxx", "loopback"], Meta(description="How KV blocks move between workers")
    ] = "auto"
    transport_floor_mb_s: Annotated[
        float, Meta(description="Least bandwidth, in MB/s, that a pair of workers must measure to serve", ge=0)
    ] = 100.0
    allow_slow_transport: Annotated[bool, Meta(description="Serve below transport_floor_mb_s, with a warning")] = False
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Threads that compute; none: this worker's share of the cores"),
    ] = None
    cpu_kernels: Annotated[
        Literal["auto", "torch"],
        Meta(
            description="Decode steps on a CPU: auto compiles kernels in C if there is a compiler, torch does without"
        ),
    ] = "auto"
    engine_stall_s: Annotated[
        Annotated[float, Meta(ge=3, le=3600)] | None,
        Meta(
            description="Seconds that an engine may stand still before it counts as lost, and is killed; "
            "six times as long while it uses a CPU; none: for ever"
        ),
    ] = 10.0
    seed: Annotated[int, Meta(description="Seed of dummy weights", ge=0, le=2**63 - 1)] = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for what is no device, or where two settings name different ones."""
        if self.device is None:
            return
        _check_device("device", self.device)
        if self.cuda_index is not None and self.device != f"cuda:{self.cuda_index}":
            raise ConfigError(
                f"device: {self.device} and cuda_index: {self.cuda_index} contradict each other: give one of the two"
            )


class WorkerConfig(EngineConfig, frozen=True, kw_only=True):
    """What a prefill and a decode worker share."""

    router: Annotated[
        tuple[str, ...], Meta(description="Routers to register with, as host:port, separated by commas", min_length=1)
    ] = ("127.0.0.1:7070",)
    worker_id: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")] | None,
        Meta(description="Name that survives restarts; unset: role-hostname-port"),
    ] = None
    advertise: Annotated[
        str | None, Meta(description="host:port at which others reach this worker; unset: host and port listened on")
    ] = None
    watermark: Annotated[
        float,
        Meta(
            description="Share of the pool up to which new requests are taken; those in hand grow into the rest",
            gt=0,
            le=1,
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError for an address that is not host:port, and for what a device cannot do."""
        super().__post_init__()
        for address in self.router:
            parse_address("router", address)
        if self.batch_invariant and not self.on_gpu:
            raise ConfigError(f"batch_invariant: it is for GPUs, and the device is {self.compute_device}")
        if self.advertise is not None:
            parse_address("advertise", self.advertise)

    @property
    def compute_device(self) -> str:
        """`cpu` or `cuda:N`, whichever setting says so."""
        return self.device or ("cpu" if self.cuda_index is None else f"cuda:{self.cuda_index}")

    @property
    def on_gpu(self) -> bool:
        """True where a GPU computes."""
        return self.compute_device != "cpu"

    @property
    def step_requests(self) -> int:
        """`max_running`, or what suits the device."""
        return self.max_running or (256 if self.on_gpu else 64)

    @property
    def step_tokens(self) -> int:
        """`max_batch_tokens`, or what suits the tier: alone on a GPU, prompts need no more to fill it."""
        prefills = isinstance(self, PrefillConfig) and self.on_gpu
        return self.max_batch_tokens or (1024 if prefills else 512)


class PrefillConfig(WorkerConfig, frozen=True, kw_only=True):
    """A prefill worker's settings."""

    port: Annotated[int, Meta(description="gRPC port", ge=0, le=65535)] = 7080


class DecodeConfig(WorkerConfig, frozen=True, kw_only=True):
    """A decode worker's settings."""

    port: Annotated[int, Meta(description="gRPC port", ge=0, le=65535)] = 7090
    watermark: Annotated[
        float,
        Meta(
            description="Share of the pool up to which new requests are taken; those in hand grow into the rest",
            gt=0,
            le=1,
        ),
    ] = 0.92
    local_prefill: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="Whether prompts are computed here: auto does where no prefill worker can or the router says so"
        ),
    ] = "auto"
    claim_timeout_s: Annotated[float, Meta(description="Seconds a reservation waits for its writer's claim", gt=0)] = (
        10.0
    )
    silence_timeout_s: Annotated[
        float, Meta(description="Seconds without a new part after which a writer is given up", gt=0)
    ] = 10.0
    quarantine_alarm_s: Annotated[
        float, Meta(description="Seconds in quarantine after which blocks raise an alarm", gt=0)
    ] = 30.0
    quarantine_limit: Annotated[
        float, Meta(description="Share of the pool past its quarantine alarm at which the worker restarts", gt=0, le=1)
    ] = 0.05


class UpConfig(EngineConfig, frozen=True, kw_only=True):
    """`paceline up`: all roles on one machine. Settings that a role shares are handed on to it."""

    port: Annotated[int, Meta(description="The router's gRPC port", ge=0, le=65535)] = 7070
    prefill: Annotated[int, Meta(description="Prefill workers to start", ge=0, le=64)] = 1
    decode: Annotated[int, Meta(description="Decode workers to start", ge=1, le=64)] = 1
    prefill_port: Annotated[
        int,
        Meta(description="Port of the first prefill worker, the next ones follow; 0 takes free ones", ge=0, le=65471),
    ] = 0
    decode_port: Annotated[
        int,
        Meta(description="Port of the first decode worker, the next ones follow; 0 takes free ones", ge=0, le=65471),
    ] = 0
    prefill_devices: Annotated[
        tuple[str, ...],
        Meta(description="Devices of the prefill workers, in turn; none given: device for all", max_length=64),
    ] = ()
    decode_devices: Annotated[
        tuple[str, ...],
        Meta(description="Devices of the decode workers, in turn; none given: device for all", max_length=64),
    ] = ()
    local_prefill: Annotated[
        Literal["auto", "always", "never"],
        Meta(description="Whether decode workers compute prompts; see paceline decode"),
    ] = "auto"
    ready_timeout_s: Annotated[float, Meta(description="Seconds until all roles must serve, fetching apart", gt=0)] = (
        120.0
    )
    max_deaths: Annotated[
        int, Meta(description="Deaths of roles within death_window_s after which up itself gives up", ge=1)
    ] = 5
    death_window_s: Annotated[float, Meta(description="Window in which deaths are counted, in seconds", gt=0)] = 60.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a listed device that is none, and for settings that contradict each other."""
        super().__post_init__()
        if not self.prefill and self.local_prefill == "never":
            raise ConfigError(
                "prefill: 0 and local_prefill: never contradict each other: nobody would compute a prompt"
            )
        for setting in ("prefill_devices", "decode_devices"):
            for device in getattr(self, setting):
                _check_device(setting, device)
                if self.cuda_index is not None and device != f"cuda:{self.cuda_index}":
                    raise ConfigError(
                        f"{setting}: {device} and cuda_index: {self.cuda_index} contradict each other: "
                        "give one of the two"
                    )


SECTIONS: Final[dict[str, type[CommonConfig]]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "up": UpConfig,
}


def _check_device(setting: str, device: str) -> None:
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"{setting}: {quote(device)} is no device; allowed are cpu, and cuda:N for GPU N")


def load(cls: type[C], *, file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> C:
    """The settings of one role. `flags` holds what was given alone. ConfigError names setting, value and limit."""
    section = next(name for name, known in SECTIONS.items() if known is cls)
    defaults = {"cache_dir": default_cache_dir(env), "run_dir": default_run_dir(env)}
    return merge(cls, section=section, sections=SECTIONS, file=file, env=env, flags=flags, defaults=defaults)


def parse_address(setting: str, address: str) -> tuple[str, int]:
    """(host, port) of `host:port` or `[v6]:port`; `setting` is named in the ConfigError where it is neither."""
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{setting}: {quote(address)} is not host:port with a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def worker_name(config: PrefillConfig | DecodeConfig, *, port: int) -> str:
    """`worker_id`, or role-hostname-port with the port that is really listened on."""
    if config.worker_id is not None:
        return config.worker_id
    role = "prefill" if isinstance(config, PrefillConfig) else "decode"
    return f"{role}-{socket.gethostname()}-{port}"


def advertised_address(config: WorkerConfig, *, port: int) -> str:
    """`advertise`, or host:port with the port that is really listened on; the hostname for a wildcard host."""
    if config.advertise is not None:
        return config.advertise
    host = socket.gethostname() if config.host in ("0.0.0.0", "::", "[::]") else config.host
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def ensure_run_dir(path: Path) -> Path:
    """Makes the run folder with mode 0700. Raises ConfigError where it is another user's, or open to others."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"run_dir: {path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"run_dir: {path} must be a folder, and no link; one that is not there yet is made")
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"run_dir: {path} must be a folder of user {os.getuid()} with mode 0700, "
            f"and is user {status.st_uid}'s with mode {stat.S_IMODE(status.st_mode):04o}: {_mend(path, status.st_uid)}"
        )
    return path


def _mend(path: Path, owner: int) -> str:
    other = "give another one, which is made where it is not there yet"
    return f"chmod 700 {shlex.quote(str(path))}, or {other}" if owner == os.getuid() else other
