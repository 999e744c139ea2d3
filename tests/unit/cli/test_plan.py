from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paceline.cli.entry import parser
from paceline.cli.plan import Plan, Sources, free_ports, make_plan
from paceline.config import SECTIONS, CommonConfig, DecodeConfig, PrefillConfig, RouterConfig, UpConfig, load
from paceline.errors import AddressInUse, ConfigError


def plan(tmp_path: Path, *, toml: str = "", env: dict[str, str] | None = None, **flags: object) -> Plan:
    file = None
    if toml:
        file = tmp_path / "paceline.toml"
        file.write_text(toml)
    flags.setdefault("run_dir", tmp_path / "run")
    flags.setdefault("log_json", True)
    sources = Sources(flags=flags, file=file, env=env or {})
    config = load(UpConfig, file=file, env=sources.env, flags=flags)
    return make_plan(config, sources, parent=42)


def settings(of: Plan, name: str, env: dict[str, str] | None = None) -> CommonConfig:
    """What the role itself makes of its command line."""
    command = next(role.command for role in of.roles if role.name == name)
    arguments = parser().parse_args(command[4:])
    assert arguments.die_with_parent == 42
    return load(SECTIONS[arguments.command], file=arguments.config, env=env or {}, flags=vars(arguments))


def decode(of: Plan, name: str = "decode-0") -> DecodeConfig:
    config = settings(of, name)
    assert isinstance(config, DecodeConfig)
    return config


def router(of: Plan) -> RouterConfig:
    config = settings(of, "router")
    assert isinstance(config, RouterConfig)
    return config


def test_every_role_gets_a_name_and_the_routers_address_and_workers_choose_their_ports(tmp_path: Path) -> None:
    made = plan(tmp_path, port=0, prefill=2, decode=2)
    assert [role.name for role in made.roles] == ["router", "prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert [role.stops_last for role in made.roles] == [False, True, True, True, True]
    configs = [settings(made, role.name) for role in made.roles]
    ports = [config.port for config in configs if isinstance(config, RouterConfig | PrefillConfig | DecodeConfig)]
    assert ports[0] != 0
    assert ports[1:] == [0, 0, 0, 0]
    assert made.address == f"127.0.0.1:{ports[0]}"
    for name, config in zip(made.workers, configs[1:], strict=True):
        assert isinstance(config, PrefillConfig | DecodeConfig)
        assert config.worker_id == name
        assert config.router == (made.address,)
        assert config.threads is not None


def test_ports_that_are_given_count_up_from_the_first(tmp_path: Path) -> None:
    made = plan(tmp_path, port=7171, prefill=0, decode=3, decode_port=7300)
    assert made.address == "127.0.0.1:7171"
    assert [decode(made, f"decode-{index}").port for index in range(3)] == [7300, 7301, 7302]


def test_ports_that_overlap_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="port 7081 is asked for twice"):
        plan(tmp_path, port=0, prefill=2, prefill_port=7080, decode_port=7081)


def test_free_ports_are_distinct_and_none_that_an_outgoing_connection_could_get() -> None:
    ports = free_ports("127.0.0.1", 20)
    assert len({*ports}) == 20
    assert all(20_000 <= port < 30_000 for port in ports)


def test_a_host_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AddressInUse, match=r"192\.0\.2\.1"):
        plan(tmp_path, port=0, host="192.0.2.1")


def test_a_port_that_another_process_listens_on_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(AddressInUse, match=rf"port {port} of 127\.0\.0\.1"):
            plan(tmp_path, port=port)


def test_two_clusters_of_one_user_share_no_run_folder(tmp_path: Path) -> None:
    first, second = (decode(plan(tmp_path, port=port)).run_dir for port in (7171, 7172))
    assert first != second
    assert first.parent == second.parent
    assert first.stat().st_mode & 0o777 == first.parent.stat().st_mode & 0o777 == 0o700


def test_what_up_was_given_reaches_each_role_that_knows_it(tmp_path: Path) -> None:
    made = plan(tmp_path, port=0, pool_blocks=99, grace_s=3.5, model="dummy:tiny", offline=True, local_prefill="never")
    assert (decode(made).pool_blocks, decode(made).grace_s, decode(made).local_prefill) == (99, 3.5, "never")
    assert (router(made).grace_s, router(made).model, router(made).offline) == (3.5, "dummy:tiny", True)


def test_a_roles_own_table_wins_over_ups_and_a_flag_of_up_over_both(tmp_path: Path) -> None:
    toml = "[up]\npool_blocks = 11\nmax_running = 12\n[decode]\npool_blocks = 22\nclaim_timeout_s = 3.0\n"
    made = plan(tmp_path, toml=toml, port=0)
    assert (decode(made).pool_blocks, decode(made).max_running, decode(made).claim_timeout_s) == (22, 12, 3.0)
    prefill = settings(made, "prefill-0")
    assert isinstance(prefill, PrefillConfig)
    assert prefill.pool_blocks == 11
    assert decode(plan(tmp_path, toml=toml, port=0, pool_blocks=33)).pool_blocks == 33


def test_one_role_or_one_worker_may_have_settings_of_its_own(tmp_path: Path) -> None:
    flags: dict[str, object] = {"port": 0, "decode": 2, "run_dir": tmp_path / "run", "log_json": True}
    own = {"decode": {"dtype": "bfloat16"}, "decode-1": {"pool_blocks": 7}, "router": {"queue_size": 1}}
    sources = Sources(flags=flags, env={}, per_role=own)
    made = make_plan(load(UpConfig, file=None, env={}, flags=flags), sources, parent=42)
    assert [decode(made, name).dtype for name in ("decode-0", "decode-1")] == ["bfloat16", "bfloat16"]
    assert [decode(made, name).pool_blocks for name in ("decode-0", "decode-1")] == [None, 7]
    assert router(made).queue_size == 1


def test_a_bad_setting_of_a_role_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="claim_timeout_s"):
        plan(tmp_path, toml="[decode]\nclaim_timeout_s = -1.0\n", port=0)


@pytest.mark.parametrize(("metrics_port", "ports"), [(0, [0, 0, 0]), (None, [None] * 3), (9100, [9100, 9101, 9102])])
def test_metrics_ports_count_up_unless_free_ones_or_none_are_asked_for(
    tmp_path: Path, metrics_port: int | None, ports: list[int | None]
) -> None:
    made = plan(tmp_path, port=0, metrics_port=metrics_port)
    assert [settings(made, role.name).metrics_port for role in made.roles] == ports


def test_workers_of_one_tier_share_the_cores_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert decode(plan(tmp_path, port=0, prefill=1, decode=1)).threads == 8
    assert decode(plan(tmp_path, port=0, prefill=1, decode=2)).threads == 4
    assert decode(plan(tmp_path, port=0, prefill=4, decode=8)).threads == 1
    assert decode(plan(tmp_path, port=0, threads=5)).threads == 5


def test_a_wildcard_host_is_reached_through_the_loopback(tmp_path: Path) -> None:
    made = plan(tmp_path, port=7171, host="0.0.0.0")
    assert made.address == "127.0.0.1:7171"
    assert decode(made).router == ("127.0.0.1:7171",)
    assert decode(made).host == "0.0.0.0"
