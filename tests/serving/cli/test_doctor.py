import jax
import pytest

from jattn.serving.cli.main import main
from jattn.serving.engine import doctor
from tests.conftest import GOLDEN


class TestDoctor:
    def test_report_names_the_version_the_devices_and_every_feature(self, capsys):
        assert main(["doctor"]) == 0
        out = capsys.readouterr().out
        assert f"jax {jax.__version__}" in out
        assert jax.devices()[0].device_kind in out
        for feature in doctor.FEATURES:
            assert any(line.startswith(feature + "  ") for line in out.splitlines())

    def test_report_for_another_gpu_lists_its_kernels(self, capsys):
        assert main(["doctor", "--device", "h100"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fp8 cache  ")]
        assert line.split()[2:] == ["mosaic_gpu", "mosaic_gpu"]

    def test_engine_options_require_a_model(self, capsys):
        assert main(["doctor", "--kv-cache-dtype=fp8"]) == 1
        out, err = capsys.readouterr()
        assert (out, err) == ("", "jattn: --kv-cache-dtype requires --model NAME.\n")

    def test_report_on_a_model_covers_every_bucket(self, capsys, monkeypatch):
        monkeypatch.setattr("jattn.models.loading.pretrained.load", None)  # No weights are loaded.
        options = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-dtype", "fp8_e4m3"]
        assert main(["doctor", "--model", str(GOLDEN / "hf" / "mistral"), *options]) == 0
        out = capsys.readouterr().out
        for bucket in ("4+0/0x32", "0+4/64x32"):
            assert bucket in out
        assert "4/2 heads of 32, window=(23, 0); float32 queries, NHD float8_e4m3fn x scale" in out
        assert "mosaic_gpu: the kernels need an NVIDIA GPU" in out

    def test_draft_model_is_not_loaded(self, capsys, monkeypatch):
        monkeypatch.setattr("jattn.serving.engine.served_model.load", None)
        folder = str(GOLDEN / "hf" / "mistral")
        sizes = ["--max-num-seqs=2", "--max-num-batched-tokens=32"]
        assert main(["doctor", f"--model={folder}", f"--speculative={folder}", *sizes]) == 0
        assert "buckets" in capsys.readouterr().out

    @pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU may have the kernels")
    def test_cpu_uses_xla_for_every_feature_with_a_reason(self):
        for feature in doctor.FEATURES:
            for region in doctor.REGIONS:
                choice = doctor.diagnose(feature, region)
                assert choice.implementation == "xla", feature
                assert choice.reason.startswith("mosaic_gpu")
                assert "cpu" in choice.reason

    def test_reason_is_printed_once_as_a_note(self, monkeypatch):
        monkeypatch.setattr("pallas_kernels.support.why_not_on", lambda *_: None)  # as on a Hopper GPU
        out = doctor.report()
        (line,) = [line for line in out.splitlines() if line.startswith("layout packed")]
        assert line.split()[2:] == ["xla", "[1]", "xla", "[1]"]
        assert out.count("supported: NHD, HND") == 1
        assert "[2]" in out
