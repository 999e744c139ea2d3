from __future__ import annotations

import argparse
import os
import typing
from pathlib import Path

import msgspec
import pytest

from paceline.config import (
    SECTIONS,
    CommonConfig,
    DecodeConfig,
    PrefillConfig,
    RouterConfig,
    UpConfig,
    add_flags,
    advertised_address,
    ensure_run_dir,
    flags_for,
    load,
    parse_address,
    worker_name,
)
from paceline.errors import ConfigError
from paceline.settings import settings_of

EVERY_ROLE = pytest.mark.parametrize("cls", SECTIONS.values(), ids=SECTIONS)


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "paceline.toml"
    file.write_text(text)
    return file


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, "[router]\nqueue_size = 1\nport = 1\nlease_s = 11")
    env = {"PACELINE_QUEUE_SIZE": "2", "PACELINE_PORT": "2"}
    config = load(RouterConfig, file=file, env=env, flags={"queue_size": "3"})
    assert (config.queue_size, config.port, config.lease_s) == (3, 2, 11.0)
    assert config.queue_timeout_s == RouterConfig().queue_timeout_s


def test_a_roles_own_table_beats_the_top_level_which_other_roles_share(tmp_path: Path) -> None:
    file = write(tmp_path, 'log_level = "debug"\nmax_running = 8\n[decode]\nmax_running = 16\n[up]\nprefill = 3')
    running = {
        cls: load(cls, file=file, env={}, flags={}).max_running for cls in (PrefillConfig, DecodeConfig, UpConfig)
    }
    assert running == {PrefillConfig: 8, DecodeConfig: 16, UpConfig: 8}
    assert load(RouterConfig, file=file, env={}, flags={}).log_level == "debug"
    assert load(UpConfig, file=file, env={}, flags={}).prefill == 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("queue_sise = 4", "queue_sise"),
        ("[router]\npool_blocks = 4", "pool_blocks"),
        ("[prefil]\nport = 4", "prefil"),
        ("port = ", "TOML"),
        ("[router]\nport = 70000", "65535"),
    ],
)
def test_a_file_with_a_mistake_is_rejected_naming_it(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(RouterConfig, file=write(tmp_path, text), env={}, flags={})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load(RouterConfig, file=tmp_path / "missing.toml", env={}, flags={})


@pytest.mark.parametrize(
    ("cls", "name", "value", "limit"),
    [
        (RouterConfig, "port", "70000", "65535"),
        (RouterConfig, "queue_timeout_s", "0", "> 0"),
        (RouterConfig, "queue_size", "many", "int"),
        (RouterConfig, "log_level", "loud", "debug, info, warning, error"),
        (DecodeConfig, "pool_blocks", "1", ">= 2"),
        (DecodeConfig, "quarantine_limit", "1.5", "1"),
        (DecodeConfig, "context_tokens", "1", ">= 2"),
        (PrefillConfig, "device", "gpu", "cuda:"),
        (PrefillConfig, "router", "here", "host:port"),
        (PrefillConfig, "router", "", ">= 1"),
        (PrefillConfig, "advertise", "here:0", "host:port"),
        (PrefillConfig, "worker_id", "a b", "A-Za-z"),
        (UpConfig, "decode", "0", ">= 1"),
    ],
)
def test_a_bad_value_is_an_error_with_setting_value_and_limit(
    cls: type[CommonConfig], name: str, value: str, limit: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(cls, file=None, env={}, flags={name: value})
    message = caught.value.message
    assert message.startswith(f"{name}: ")
    assert (repr(value) in message or value == "") and limit in message


def test_the_error_of_a_bad_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="PACELINE_PORT"):
        load(RouterConfig, file=None, env={"PACELINE_PORT": "tcp://10.0.0.1:80"}, flags={})


def test_a_lease_shorter_than_two_heartbeats_is_refused() -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        load(RouterConfig, file=None, env={}, flags={"lease_s": "3", "heartbeat_s": "2"})


def test_text_gives_none_tuples_booleans_and_paths() -> None:
    flags = {"context_tokens": "none", "metrics_port": "none", "router": "a:1, b:2", "log_json": "none"}
    config = load(DecodeConfig, file=None, env={"PACELINE_OFFLINE": "true", "PACELINE_CACHE_DIR": "~/m"}, flags=flags)
    assert (config.context_tokens, config.metrics_port, config.log_json) == (None, None, None)
    assert config.router == ("a:1", "b:2")
    assert config.offline is True
    assert config.cache_dir == Path.home() / "m"


@EVERY_ROLE
def test_every_setting_has_a_flag_whose_help_has_its_description(cls: type[CommonConfig]) -> None:
    parser = argparse.ArgumentParser(prog="x")
    add_flags(parser, cls)
    text = " ".join(parser.format_help().split())
    for setting in settings_of(cls).values():
        assert setting.flag in text
        assert " ".join(setting.description.split()) in text


@EVERY_ROLE
def test_flags_that_are_not_given_leave_no_attribute(cls: type[CommonConfig]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, cls)
    assert vars(parser.parse_args([])) == {}


@EVERY_ROLE
def test_a_command_line_made_from_a_config_gives_the_same_config(cls: type[CommonConfig]) -> None:
    config = load(cls, file=None, env={"HOME": "/h"}, flags={"offline": "true", "grace_s": "1.5"})
    parser = argparse.ArgumentParser()
    add_flags(parser, cls)
    values = msgspec.structs.asdict(config)
    again = load(cls, file=None, env={}, flags=vars(parser.parse_args(flags_for(cls, values))))
    assert again == config


def test_a_command_line_leaves_out_what_the_role_does_not_know() -> None:
    assert flags_for(RouterConfig, {"prefill": 2, "offline": False, "port": 0}) == ["--no-offline", "--port=0"]


@EVERY_ROLE
def test_defaults_satisfy_their_own_limits(cls: type[CommonConfig]) -> None:
    config = load(cls, file=None, env={}, flags={})
    for name, value in msgspec.structs.asdict(config).items():
        assert settings_of(cls)[name].convert(value, "the default") == value


@EVERY_ROLE
def test_configs_are_frozen(cls: type[CommonConfig]) -> None:
    with pytest.raises(AttributeError):
        typing.cast(typing.Any, cls()).host = "0.0.0.0"


def test_folders_follow_the_given_environment_alone() -> None:
    env = {"XDG_CACHE_HOME": "/c", "XDG_RUNTIME_DIR": "/r"}
    config = load(RouterConfig, file=None, env=env, flags={})
    assert (config.cache_dir, config.run_dir) == (Path("/c/paceline"), Path("/r/paceline"))
    assert load(RouterConfig, file=None, env={}, flags={}).run_dir == Path(f"/tmp/paceline-{os.getuid()}")


@pytest.mark.parametrize(
    ("address", "parts"), [("a:1", ("a", 1)), ("[::1]:7070", ("::1", 7070)), ("10.0.0.1:65535", ("10.0.0.1", 65535))]
)
def test_an_address_is_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert parse_address("router", address) == parts


@pytest.mark.parametrize(
    "address",
    [
        *("", "a", ":1", "a:", "a:0", "a:65536", "a:-1", "a:\u0661", "a:" + "1" * 5_000),
        # To gRPC these would be schemes, and lists of addresses.
        *("ipv4:127.0.0.1,10.0.0.1:5", "ipv6:[::1]:5", "dns:a:5", "unix:a:5", "dns://server/a:5", "vsock:1:5"),
        *("::1:7070", "[::1:5", "::1]:5", "[]:5", "[a]:5", "a b:5", "a,b:5", "a\n:5", " a:5", "a :5", "user@a:5"),
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="router"):
        parse_address("router", address)


def test_a_worker_is_named_after_role_host_and_port_unless_told() -> None:
    assert worker_name(PrefillConfig(), port=5).startswith("prefill-")
    assert worker_name(DecodeConfig(), port=5).endswith("-5")
    assert worker_name(DecodeConfig(worker_id="d"), port=5) == "d"


def test_a_worker_on_a_wildcard_address_advertises_its_hostname() -> None:
    assert advertised_address(DecodeConfig(host="127.0.0.1"), port=5) == "127.0.0.1:5"
    assert not advertised_address(DecodeConfig(host="0.0.0.0"), port=5).startswith("0.0.0.0")
    assert advertised_address(DecodeConfig(host="::1"), port=5) == "[::1]:5"
    assert advertised_address(DecodeConfig(advertise="x:9"), port=5) == "x:9"


def test_the_run_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert ensure_run_dir(folder) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert ensure_run_dir(folder) == folder


def test_a_run_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError) as caught:
        ensure_run_dir(folder)
    assert caught.value.message == (
        f"run_dir: {folder} must be a folder of user {os.getuid()} with mode 0700, and is user {os.getuid()}'s with "
        f"mode 0777: chmod 700 {folder}, or give another one, which is made where it is not there yet"
    )


def test_a_run_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match=r"run_dir: .* cannot be made: File exists"):
        ensure_run_dir(tmp_path / "run")


def test_a_run_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be a folder, and no link"):
        ensure_run_dir(tmp_path / "run")
