"""Models by numbers: parameters equal to the published ones; files of users are checked, key by key."""

import pytest

from parallel.cli import measure_device
from parallel.nn.models import transformer
from parallel.planning.analytic.presets import load, parse
from parallel.planning.analytic.transformer import RoutedExperts, Transformer

PRESETS = load()

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "opt-13b": 12_853_473_280,
    "llama-65b": 65_285_660_672,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
}
"""Elements of the published checkpoints; of DeepSeek-V3 without the module for multi-token prediction."""

BILLIONS = {"gpt-3": 175, "palm-540b": 540.35, "opt-175b": 175, "megatron-22b": 22, "megatron-1t": 1008}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_checkpoints(name):
    assert PRESETS.models[name].parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_of_papers(name):
    assert PRESETS.models[name].parameters == pytest.approx(BILLIONS[name] * 1e9, rel=4e-3)


def test_active_parameters():
    assert PRESETS.models["mixtral-8x7b"].active_parameters == pytest.approx(12.9e9, rel=2e-3)
    assert PRESETS.models["deepseek-v3"].active_parameters == pytest.approx(37e9, rel=2e-2)
    assert PRESETS.models["gpt-3"].active_parameters == PRESETS.models["gpt-3"].parameters


@pytest.mark.parametrize(("layers", "heads", "width", "vocabulary", "length"), [(2, 2, 64, 256, 16), (3, 5, 40, 97, 8)])
def test_our_own_transformer_is_the_one_of_gpt2(layers, heads, width, vocabulary, length):
    own = sum(parameter.size for parameter in transformer(vocabulary, length, layers, heads, width).parameters())
    numbers = Transformer(layers, width, heads, vocabulary, length, positions=length, bias=True, tied=True)
    assert numbers.parameters == own


def test_every_preset_has_a_source():
    for table in (PRESETS.models, PRESETS.devices, PRESETS.clusters):
        assert all(entry.source for entry in table.values())


MINE = "[models.mine]\nlayers = 4\nwidth = 64\nheads = 4\nvocabulary = 100\ncontext = 32\n"


def test_users_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        MINE
        + "experts = { count = 4, active = 2, width = 32 }\n[devices.box]\nmemory = 16e9\nbandwidth = 50_000_000_000\n"
        "peak = { fp32 = 1e12 }\n[clusters.lan]\ndevice = 'box'\nper_node = 2\n"
        "inside = { alpha = 1e-6, rate = 1e10 }\nbetween = { alpha = 5e-5, rate = 1.25e8 }\n"
    )
    found = load([path])
    assert found.models["mine"] == Transformer(4, 64, 4, 100, 32, experts=RoutedExperts(4, 2, 32))
    assert found.device_of(found.clusters["lan"]).peak_of("fp32") == 1e12
    assert found.clusters["lan"].link(2).rate == 1e10 and found.clusters["lan"].link(2, stride=2).rate == 1.25e8
    assert "llama-3-70b" in found.models


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINE.replace("layers", "layer"), r"f: models.mine: unknown key 'layer' \(perhaps layers\); known: layers, "),
        (MINE.replace("layers = 4\n", ""), "f: models.mine: expected the keys layers as well"),
        (MINE.replace("= 4\nwidth", "= -4\nwidth"), "f: models.mine: layers: expected 1 or more, found -4"),
        (MINE.replace("heads = 4", "heads = 5"), "f: models.mine: heads: expected a divisor of the width 64, or"),
        (MINE.replace("32", "'32'"), "f: models.mine.context: expected a whole number, found '32'"),
        (MINE.replace("32", "3.5"), "f: models.mine.context: expected a whole number, found 3.5"),
        (MINE + "bias = 1", "f: models.mine.bias: expected true or false, found 1"),
        (MINE + "kv_heads = 3", "f: models.mine: kv_heads: expected a divisor of the 4 heads, found 3"),
        (MINE + "experts = 8", "f: models.mine.experts: expected a table, found 8"),
        (
            MINE + "experts = { count = 2, active = 4, width = 8 }",
            "f: models.mine.experts: active: expected at most the 2 experts that there are, found 4",
        ),
        (
            "[model.mine]",
            r"f: table: expected one of models, devices, clusters, stacks; found 'model' \(perhaps models\)",
        ),
        ("models = 3", r"f: models: expected tables \[models.NAME\], found 3"),
        (
            "[devices.x]\nmemory = 0\nbandwidth = 1\npeak = { fp32 = 1 }",
            "f: devices.x: memory: expected a number above",
        ),
        ("[devices.x]\nmemory = 1\nbandwidth = 1\npeak = 3", "f: devices.x.peak: expected a table of numbers, found 3"),
        ("[devices.x]\nmemory = 1\nbandwidth = 1\npeak = {}", "f: devices.x: peak: expected FLOP/s of at least one"),
        ("[devices.x]\nmemory = nan\nbandwidth = 1\npeak = { a = 1 }", "f: devices.x.memory: expected a finite number"),
        ("[devices.x]\nmemory = 1\nbandwidth = 1e-300\npeak = { a = 1 }", "f: devices.x.bandwidth: expected 0, or a"),
        (f"[devices.x]\nmemory = 1{'0' * 400}\nbandwidth = 1\npeak = {{}}", "f: devices.x.memory: expected a finite"),
        (
            MINE.replace("= 4\nwidth", "= 1_000_000_000\nwidth"),
            "f: models.mine: layers: expected at most 10000, found 1",
        ),
        (MINE.replace("32", "9223372036854775807"), "f: models.mine.context: expected a number below 1000000000000, "),
        ("[devices", "f: expected TOML, found: "),
        ("a = " + "[" * 100_000, "f: expected TOML, found: "),
    ],
)
def test_wrong_files(text, message):
    with pytest.raises(ValueError, match="^" + message):
        parse(text, "f")


def test_unreadable_files_and_unknown_devices(tmp_path):
    with pytest.raises(
        ValueError, match=r"expected a TOML file, found .*none.toml', which cannot be read: No such file"
    ):
        load([tmp_path / "none.toml"])
    path = tmp_path / "cluster.toml"
    link = "{ alpha = 0, rate = 1 }"
    path.write_text(f"[clusters.lan]\ndevice = 'h10'\nper_node = 1\ninside = {link}\nbetween = {link}")
    with pytest.raises(ValueError, match=r"clusters.lan: device: expected one of .*; found 'h10' \(perhaps h100\)"):
        load([path])


def test_a_measured_device_is_a_presets_file(tmp_path, monkeypatch, capsys):
    """The command's file is loaded, and its curve is the one that was measured."""
    monkeypatch.setattr(measure_device, "SECONDS", 0.0)
    found = measure_device.measure_device(10**9, widths=(8, 64), copied=1 << 16)
    assert max(found.efficiency.values()) == 1 and set(found.efficiency) == {1024, 524288}
    presets = parse(found.as_toml("here"), "here")
    device = presets.device_of(presets.clusters["here"])
    assert device.efficiency_of(1024) == pytest.approx(found.efficiency[1024], abs=1e-4)
    middle = sum(found.efficiency.values()) / 2
    assert device.efficiency_of((1024 + 524288) / 2) == pytest.approx(middle, abs=1e-4)
    assert device.memory == 1e9 and device.peak.keys() == {"fp32", "fp64"}
    monkeypatch.setattr(measure_device, "measure_device", lambda memory: found)
    path = tmp_path / "here.toml"
    assert measure_device.main(["--measure-device", "here", "--output", str(path)]) == 0
    assert path.read_text() == found.as_toml("here")
    for words in (["--measure-device", "a b"], ["--measure-device", "a", "--output", "/dev/null/a"]):
        with pytest.raises(SystemExit):
            measure_device.main(words)


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ("{}", "efficiency: expected shares above 0"),
        ("{ 1e9 = 1.5 }", "efficiency: expected shares above 0"),
        ("{ much = 0.5 }", "efficiency: expected numbers of FLOPs, found much"),
        ("{ -1 = 0.5 }", "efficiency: expected finite FLOPs from 0 on, found -1"),
        ("{ inf = 0.5 }", "efficiency: expected finite FLOPs from 0 on, found inf"),
    ],
)
def test_wrong_efficiency(curve, message):
    text = f"[devices.box]\npeak = {{ fp32 = 1e12 }}\nmemory = 1e9\nbandwidth = 1e9\nefficiency = {curve}\n"
    with pytest.raises(ValueError, match=message):
        parse(text, "mine.toml")
