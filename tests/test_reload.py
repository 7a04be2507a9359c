"""Reading the configuration again: what changes, what stays, and what a bad file does not do."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import snapshots
from fake_llama import Behaviour, FakeLlama
from processes import exporter, free_port, wait_for
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from exporter.config import ConfigError, Settings, parse
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import BatchRecord, Snapshot
from exporter.service.record import carried_over
from exporter.service.reload import Reloader
from exporter.service.wiring import measuring

KEY = "sk-planted-4f1d6a"
CONFIG = """
bandwidth: {{interval: 1h}}
probe: {{interval: {interval}, health_interval: 1s, batches: [1, 2], seconds: 0.1, max_duty_cycle: 0.5}}
servers:
  - name: local
    url: {url}
    api_key_file: {key}
    floor_fraction: {{1: {fraction}}}
{more}"""

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBdTCCARugAwIBAgIUFraZ7BZVinoJ69Y543l9m9zc5HAwCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEdGVzdDAgFw0yNjEyMDEwMDIyMDBaGA8yMTI2MTEwNzAwMjIw
MFowDzENMAsGA1UEAwwEdGVzdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABP1U
bVrVNmwsku6XmVyQEFzfHub96coqhAmktBPEuqOSC7Uiefuuc0Q0b9ntPE3lg20H
UeHOWwDLN7eQU6XhuFajUzBRMB0GA1UdDgQWBBQPm42n52R13FrU9d4btQynrcUA
tDAfBgNVHSMEGDAWgBQPm42n52R13FrU9d4btQynrcUAtDAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0gAMEUCIQDva4nU1VFdz65bTOnfCFNOQtygPz/xUwp1
dwxK2VDPcgIgfAqhzVSe6XSx8QzO2Mw+Cie+79NP3zdHToMPD9qKWdk=
-----END CERTIFICATE-----
"""


class Clock:
    now = 100.0

    def unix(self) -> float:
        return self.now


class TestReloader:
    def settings(self, interval: str = "5m") -> Settings:
        server = "servers: [{name: a, url: 'http://127.0.0.1:1'}]"
        return parse(f"probe: {{interval: {interval}}}\n{server}", "test")

    async def test_a_valid_file_is_taken_and_told(self) -> None:
        clock, told = Clock(), []
        subject = Reloader(self.settings(), lambda: self.settings("10m"), clock.unix)
        subject.in_force(subject.settings, lambda: told.append(subject.settings.probe.interval))
        clock.now = 200.0
        assert await subject.reload() == ()
        assert told == [600.0]
        stamped = subject.stamped(snapshots.rich())
        assert (stamped.config_reload_ok, stamped.config_reload_timestamp) == (True, 200.0)

    async def test_the_log_says_when_a_file_is_in_force(self) -> None:
        subject = Reloader(self.settings(), lambda: self.settings("10m"), Clock().unix)
        with capture_logs() as logs:
            subject.in_force(subject.settings, lambda: None)
            assert logs == [], "the start is told otherwise"
            first = subject.settings
            await subject.reload()
            assert [(line["event"], line["changed"]) for line in logs] == [
                ("configuration read again: in force when the measurement at hand ends", True)
            ]
            subject.in_force(first, lambda: None)
            assert len(logs) == 1, "it was read while the first was put in force"
            subject.in_force(subject.settings, lambda: None)
            await subject.reload()
        assert [line["event"] for line in logs[1:]] == [
            "configuration in force",
            "configuration read again: nothing has changed",
        ]

    async def test_what_is_probably_a_mistake_in_a_new_file_is_told(self) -> None:
        mistaken = parse("servers: [{name: a, url: 'http://127.0.0.1:1/v1'}]", "test")
        subject = Reloader(self.settings(), lambda: mistaken, Clock().unix)
        with capture_logs() as logs:
            await subject.reload()
            await subject.reload()
        (warned,) = [line for line in logs if line["log_level"] == "warning"]
        assert warned["server"] == "a"
        assert warned["event"].endswith("leave out /v1: write http://127.0.0.1:1")

    async def test_the_same_file_changes_nothing_but_the_time(self) -> None:
        clock, told = Clock(), []
        subject = Reloader(self.settings(), self.settings, clock.unix)
        subject.in_force(subject.settings, lambda: told.append(1))
        clock.now = 200.0
        assert await subject.reload() == ()
        assert (told, subject.loaded_at) == ([], 200.0)

    async def test_a_file_read_while_another_is_put_in_force_is_not_lost(self) -> None:
        told = []
        subject = Reloader(self.settings(), lambda: self.settings("10m"), Clock().unix)
        first = subject.settings
        await subject.reload()
        subject.in_force(first, lambda: told.append(1))
        assert told == [1]
        subject.in_force(subject.settings, lambda: told.append(2))
        assert told == [1]

    async def test_a_bad_file_keeps_everything(self) -> None:
        def load() -> Settings:
            return parse("probe: {interval: nonsense, batches: [0]}", "c.yaml")

        clock, told = Clock(), []
        subject = Reloader(self.settings(), load, clock.unix)
        subject.in_force(subject.settings, lambda: told.append(1))
        clock.now = 200.0
        errors = await subject.reload()
        assert len(errors) == 2
        assert all(error.startswith("c.yaml:1: probe.") for error in errors)
        assert (told, subject.settings) == ([], self.settings())
        stamped = subject.stamped(snapshots.rich())
        assert (stamped.config_reload_ok, stamped.config_reload_timestamp) == (False, 100.0)

    async def test_a_good_file_after_a_bad_one(self) -> None:
        answers: Iterator[ConfigError | Settings] = iter([ConfigError(["no"]), self.settings("10m")])

        def load() -> Settings:
            answer = next(answers)
            if isinstance(answer, ConfigError):
                raise answer
            return answer

        subject = Reloader(self.settings(), load, Clock().unix)
        assert await subject.reload() == ("no",)
        assert await subject.reload() == ()
        assert subject.ok

    async def test_a_file_without_servers_is_not_taken_while_some_are_watched(self) -> None:
        """An editor that is caught in the middle of writing leaves an empty file."""
        servers = parse("servers: [{name: a, url: 'http://127.0.0.1:1'}]", "test")
        subject = Reloader(servers, lambda: parse("", "test"), Clock().unix)
        assert len(await subject.reload()) == 1
        assert (subject.ok, subject.settings) == (False, servers)

    def secure(self, tmp_path: Path, name: str = "a") -> Settings:
        (tmp_path / "ca").write_text(CERTIFICATE)
        (server,) = parse(f"servers: [{{name: {name}, url: 'https://127.0.0.1:1'}}]", "test").servers
        return Settings(servers=(server.model_copy(update={"ca_file": tmp_path / "ca"}),))

    async def test_another_certificate_under_the_same_name_is_taken(self, tmp_path: Path) -> None:
        told = []
        secure = self.secure(tmp_path)
        subject = Reloader(secure, lambda: secure, Clock().unix)
        subject.in_force(subject.settings, lambda: told.append(1))
        assert await subject.reload() == ()
        assert told == [1]

    async def test_a_certificate_that_goes_away_before_it_is_put_in_force_is_kept(self, tmp_path: Path) -> None:
        subject = Reloader(self.settings(), lambda: self.secure(tmp_path), Clock().unix)
        assert await subject.reload() == ()
        (tmp_path / "ca").unlink()
        async with measuring(subject.settings, trusted=subject.trusted) as scheduler:
            assert len(scheduler.watches) == 1
        with pytest.raises(OSError, match="No such file"):
            async with measuring(subject.settings):
                pass

    @pytest.mark.parametrize("text", [None, "x"])
    async def test_a_certificate_that_is_none_when_it_is_read_changes_nothing(
        self, text: str | None, tmp_path: Path
    ) -> None:
        """It was one when the file was validated."""

        def load() -> Settings:
            found = self.secure(tmp_path, "b")
            (tmp_path / "ca").unlink()
            if text is not None:
                (tmp_path / "ca").write_text(text)
            return found

        first = self.secure(tmp_path)
        subject = Reloader(first, load, Clock().unix)
        assert len(await subject.reload()) == 1
        assert (subject.ok, subject.settings) == (False, first)

    async def test_a_slow_file_keeps_nobody_else_waiting_and_reloads_take_turns(self) -> None:
        """Names are looked up, and the file may lie on a disk that is gone."""
        release, begun, first = threading.Event(), [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def load() -> Settings:
            begun.append(1)
            loop.call_soon_threadsafe(first.set)
            assert release.wait(60)
            return self.settings("10m")

        subject = Reloader(self.settings(), load, Clock().unix)
        subject.reload_soon()
        asked = asyncio.create_task(subject.reload())
        await first.wait()
        await asyncio.sleep(0.05)
        assert (len(begun), asked.done(), subject.settings) == (1, False, self.settings())
        release.set()
        assert await asked == ()
        assert (len(begun), subject.settings) == (2, self.settings("10m"))

    async def test_without_a_thread_the_old_configuration_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        subject = Reloader(self.settings(), lambda: self.settings("10m"), Clock().unix)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            errors = await subject.reload()
        assert errors == ("no thread to read it in: can't start new thread",)
        assert (subject.ok, subject.settings) == (False, self.settings())

    async def test_without_a_file_there_is_nothing_to_read(self) -> None:
        assert await Reloader(self.settings(), None, Clock().unix).reload() == (
            "there is no configuration file to read again",
        )


class TestCarriedOver:
    def test_the_same_server_keeps_what_was_measured(self) -> None:
        old = snapshots.cpu_server()
        new = replace(
            snapshots.cpu_server(), succeeded=0, counts={}, model=None, batches={1: BatchRecord(threshold=0.5)}
        )
        kept = carried_over(new, old, same=True)
        assert kept.batches[1].sample == old.batches[1].sample
        assert kept.batches[1].threshold == 0.5
        assert set(kept.batches) == {1}, "batches that are not configured any more are gone"
        assert (kept.model, kept.state, kept.succeeded) == (old.model, old.state, old.succeeded)

    @pytest.mark.parametrize(("threshold", "below"), [(0.25, 2), (0.5, 0)])
    def test_samples_below_another_threshold_are_counted_anew(self, threshold: float, below: int) -> None:
        server = snapshots.cpu_server()
        old = replace(server, batches={1: replace(server.batches[1], below_threshold_samples=2)})
        kept = carried_over(replace(server, batches={1: BatchRecord(threshold=threshold)}), old, same=True)
        assert kept.batches[1].below_threshold_samples == below

    def test_another_server_under_the_same_name_keeps_only_the_counters(self) -> None:
        old = snapshots.cpu_server()
        kept = carried_over(
            replace(old, model=None, batches={1: BatchRecord()}, succeeded=0, counts={}), old, same=False
        )
        assert kept.counts == {Reason.UNREACHABLE: 2, Reason.FOREIGN_REQUEST: 1, Reason.BUSY: 5}
        assert kept.succeeded == 9
        assert kept.batches == {1: BatchRecord()}
        assert kept.model is None


@pytest.mark.parametrize(("interval", "kept"), [("5m", 3600.0), ("2h", 7200.0)])
async def test_a_stretched_interval_goes_on_with_the_round_that_it_planned(interval: str, kept: float) -> None:
    """What was measured must not grow stale before the round that would renew it."""
    servers = "servers: [{name: a, url: 'http://127.0.0.1:1'}]"
    async with measuring(parse(servers, "test")) as before:
        (old,) = before.watches
        old.rounds.interval, old.rounds.due = 3600.0, old.due + 3600
        old.record = replace(old.record, interval_seconds=3600.0)
    async with measuring(parse(f"probe: {{interval: {interval}}}\n{servers}", "test"), before=before) as scheduler:
        (watch,) = scheduler.watches
        assert watch.due == old.due
        assert (watch.rounds.interval, watch.record.interval_seconds) == (kept, kept)


@contextmanager
def fake_in_a_thread(behaviour: Behaviour) -> Iterator[FakeLlama]:
    """The fake server on a loop of its own, beside a test that blocks."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        fake = FakeLlama(behaviour)
        asyncio.run_coroutine_threadsafe(fake.__aenter__(), loop).result(10)
        try:
            yield fake
        finally:
            asyncio.run_coroutine_threadsafe(fake.__aexit__(None, None, None), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def values(text: str) -> dict[str, float]:
    """Every series by its name and labels."""
    return {
        f"{s.name}{sorted(s.labels.items())}": s.value for f in text_string_to_metric_families(text) for s in f.samples
    }


def post(url: str) -> tuple[int, str]:
    try:
        with urlopen(Request(url, method="POST"), timeout=10) as answer:  # noqa: S310 - our own exporter
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.timeout(600)
def test_a_running_exporter_takes_a_new_file_and_keeps_a_good_one(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    with fake_in_a_thread(Behaviour(api_key=KEY)) as fake:

        def config(interval: str = "1h", fraction: float = 0.25, more: str = "") -> str:
            return CONFIG.format(url=fake.url, key=key, interval=interval, fraction=fraction, more=more)

        with exporter(config(), tmp_path) as running:
            file = tmp_path / "config.yaml"

            def sampled() -> bool:
                return 'roofline_decode_step_seconds{batch="2",server="local"}' in running.get("/metrics")

            wait_for("a sample", 200, sampled)
            before = values(running.get("/metrics"))

            file.write_text(config(fraction=0.5, more=f"  - {{name: second, url: 'http://127.0.0.1:{free_port()}'}}\n"))
            running.process.send_signal(signal.SIGHUP)
            wait_for("the second server", 120, lambda: 'server="second"' in running.get("/metrics"))
            after = values(running.get("/metrics"))
            assert sampled(), "what was measured of a server that stays is kept"
            assert (
                after["roofline_probes_total[('server', 'local')]"]
                >= before["roofline_probes_total[('server', 'local')]"]
            )
            assert after["roofline_memory_bandwidth_runs_total[]"] >= before["roofline_memory_bandwidth_runs_total[]"]
            assert after["roofline_decode_floor_ratio_threshold[('batch', '1'), ('server', 'local')]"] == 0.5
            assert "name: second" in running.get("/config")

            file.write_text("probe: {interval: soon, batches: [0]}\n")
            status, text = post(running.url + "/-/reload")
            assert status == 500
            assert "probe.interval" in text
            assert "probe.batches" in text
            bad = values(running.get("/metrics"))
            assert bad["roofline_config_last_reload_successful[]"] == 0
            assert "name: second" in running.get("/config")
            refused = "the new configuration cannot be used; the old one stays in force"
            wait_for("every error in the log", 60, lambda: len(running.logged(refused)) == 2)
            wait_for("one taken", 60, lambda: len(running.logged("configuration in force")) == 1)
            assert "The configuration file was not taken" in running.get("/")

            file.write_text(config())
            assert post(running.url + "/-/reload")[0] == 200
            wait_for("one server again", 120, lambda: 'server="second"' not in running.get("/metrics"))
            good = values(running.get("/metrics"))
            assert good["roofline_config_last_reload_successful[]"] == 1
            newer = "roofline_config_last_reload_success_timestamp_seconds[]"
            assert good[newer] > bad[newer]
            assert post(running.url + "/metrics")[0] == 405

            # The key was used, and is nowhere to be seen.
            assert fake.asked("/completion") > 0
            pages = [running.get(p) for p in ("/", "/metrics", "/api/v1/snapshot", "/config")]
            pages += [running.get(f"/api/v1/snapshot?format={form}") for form in ("table", "markdown", "csv")]
            assert running.end()[0] == 0
            assert KEY not in "".join([*pages, *map(str, running.log)])
            assert str(key) in "".join(pages), "only the name of its file"


def test_snapshots_are_stamped_without_being_changed() -> None:
    snapshot = Snapshot(snapshots.host())
    Reloader(parse("", "test"), None, Clock().unix).stamped(snapshot)
    assert snapshot.config_reload_timestamp == 0.0
