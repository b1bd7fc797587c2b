"""A launcher that serves fronts elsewhere, and one that serves HTTP for engines elsewhere."""

import signal

SECURE = "--insecure-cluster"


def argv_of_engines(site) -> list[list[str]]:
    return [entry["argv"] for entry in site.starts("engine")]


def test_an_engine_alone_opens_no_api_port_and_tells_its_address(site):
    file = site.root / "address"
    flags = ("--engine-only", "--engine-address", "127.0.0.1:0", SECURE, "--engine-address-file", str(file))
    launch = site.launch(*flags, FAKE_ENGINE="START=1 die_later")
    first, second = site.wait_for_start("engine"), site.wait_for_start("engine", 2)
    assert [entry["argv"][entry["argv"].index("--address") + 1] for entry in (first, second)] == [
        "127.0.0.1:0",
        "127.0.0.1:4711",
    ], "later engines keep the port that the kernel chose for the first"
    assert file.read_text() == "127.0.0.1:4711\n"
    assert "was chosen for --port" not in launch.stdout
    assert launch.end(signal.SIGTERM) == 0
    assert not site.starts("router")
    assert (file.exists(), site.left_behind()) == (False, [])


def test_two_launchers_without_a_port_have_places_of_their_own(site):
    flags = ("--engine-only", "--engine-address", "127.0.0.1:0", SECURE)
    launches = [site.launch_in_runtime_dir(*flags) for _ in range(2)]
    site.wait_for_start("engine", 2)
    places = [words[words.index("--master-shard-uds-path") + 1] for words in argv_of_engines(site)]
    assert len(set(places)) == 2
    assert [launch.end(signal.SIGTERM) for launch in launches] == [0, 0]
    assert not any(site.runtime_dir.iterdir())


def test_fronts_alone_start_no_shard_and_read_no_weights(site):
    (site.model / "pytorch_model.bin").unlink()
    launch = site.launch("--engines", "10.0.0.1:1,10.0.0.2:2", "--api-workers", "2", SECURE).ready()
    for front in (site.wait_for_start("router"), site.wait_for_start("router", 2)):
        words = front["argv"]
        assert [words[i + 1] for i, word in enumerate(words) if word == "--engines"] == ["10.0.0.1:1", "10.0.0.2:2"]
    assert launch.end(signal.SIGTERM) == 0
    assert {entry["role"] for entry in site.events("start")} == {"router"}
