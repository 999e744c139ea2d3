"""When an engine that gives no sign of life is lost, in virtual time."""

from __future__ import annotations

from paceline.services.worker.watchdog import BUSY_FACTOR, Watchdog

LIMIT_S = 10.0


def looks_until_lost(*, cpu_s: float | None, elapsed_s: float = 1.0) -> int:
    watchdog = Watchdog(LIMIT_S, interval_s=1.0)
    looks = 1
    while not watchdog.look(elapsed_s=elapsed_s, spoke=False, cpu_s=cpu_s):
        looks += 1
    return looks


def test_an_engine_that_stands_still_is_lost_at_the_limit() -> None:
    assert looks_until_lost(cpu_s=0.0) == LIMIT_S


def test_a_long_step_that_uses_a_cpu_gets_more_time_and_not_for_ever() -> None:
    assert looks_until_lost(cpu_s=1.9) == BUSY_FACTOR * LIMIT_S


def test_an_engine_that_gets_little_of_a_crowded_machine_is_not_standing_still() -> None:
    assert looks_until_lost(cpu_s=0.02) > LIMIT_S


def test_an_engine_of_which_only_its_silence_is_known_gets_the_time_of_a_busy_one() -> None:
    assert looks_until_lost(cpu_s=None) == BUSY_FACTOR * LIMIT_S


def test_a_stray_thread_is_no_work() -> None:
    assert looks_until_lost(cpu_s=0.01) == LIMIT_S


def test_a_sign_of_life_begins_the_time_anew() -> None:
    watchdog = Watchdog(LIMIT_S, interval_s=1.0)
    for _ in range(5):
        assert not any(watchdog.look(elapsed_s=1.0, spoke=False, cpu_s=0.0) for _ in range(9))
        assert not watchdog.look(elapsed_s=1.0, spoke=True, cpu_s=0.0)


def test_of_a_pause_of_the_watcher_itself_no_more_counts_than_of_one_late_look() -> None:
    """A container that was paused for an hour: both went to sleep, and the engine has had no time to answer."""
    watchdog = Watchdog(LIMIT_S, interval_s=1.0)
    assert not watchdog.look(elapsed_s=3600.0, spoke=False, cpu_s=0.0)
    assert watchdog.silent_s == 2.0
