import importlib.metadata
import io
import os
import subprocess
import sys

import jax
import pytest

from jattn.models import save
from jattn.serving.cli import options
from jattn.serving.cli.generate import StreamPrinter
from jattn.serving.cli.main import main
from jattn.serving.engine import doctor
from jattn.serving.engine.engine import Engine
from jattn.serving.engine.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.serving.engine.test_engine import one_bucket
from tests.serving.tiny import one_layer_model


class Recorded:
    """Stands for the engine that the command line makes: small, made once, with what it was asked."""

    def __init__(self, engine):
        self.engine, self.calls, self.options = engine, [], {}

    def __call__(self, model, **options):
        self.options = options
        return self

    def generate(self, *args, **kwargs):
        self.calls.append(kwargs)
        self.results = self.engine.generate(*args, **kwargs)
        return self.results

    @property
    def stats(self):
        return self.engine.stats

    @property
    def default_sampling_params(self):
        return self.engine.default_sampling_params


@pytest.fixture(scope="module")
def small_engine():
    return Engine(one_layer_model(), **one_bucket(2, 16, 17))


@pytest.fixture
def recorded(small_engine, monkeypatch):
    recorded = Recorded(small_engine)
    monkeypatch.setattr(options, "Engine", recorded)
    return recorded


MODEL = ["generate", "--model", str(GOLDEN / "hf" / "llama")]


class TestGenerate:
    def test_prints_the_prompt_and_its_completion(self, recorded, capsys):
        assert main([*MODEL, "--max-tokens", "6", "def f("]) == 0
        (result,) = recorded.results
        assert len(result.token_ids) == 6
        assert capsys.readouterr().out == f"> def f(\n{result.text}\n"
        assert recorded.calls[0]["sampling_params"].is_greedy

    def test_reads_the_prompt_from_stdin_where_there_is_none(self, recorded, capsys, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.StringIO("x = "))
        assert main([*MODEL, "--max-tokens", "2"]) == 0
        assert capsys.readouterr().out.startswith("> x = \n")

    def test_passes_the_sampling_options_on(self, recorded):
        options = [
            "--temperature=0.5",
            "--top-k=7",
            "--top-p=0.9",
            "--min-p=0.1",
            "--seed=3",
            "--stop=x",
            "--stop=yz",
        ]
        options += ["--implementation=xla", "--quantization=int8_token_head", "--skip-layers=0,-1"]
        options += ["--max-num-seqs=3", "--max-num-batched-tokens=40", "--block-size=8"]
        options += ["--num-blocks=9", "--max-model-len=99", "--no-enable-prefix-caching"]
        options += ["--speculative=ngram", "--num-speculative-tokens=2", "--no-cascade-attention"]
        options += ["--batch-invariant"]
        assert main([*MODEL, "--max-tokens", "1", *options, "a"]) == 0
        assert recorded.calls[0]["sampling_params"] == SamplingParams(
            temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=3, stop=("x", "yz")
        )
        assert recorded.options == {
            "implementation": "xla",
            "quantization": "int8_token_head",
            "skip_layers": (0, -1),
            "max_num_seqs": 3,
            "max_num_batched_tokens": 40,
            "block_size": 8,
            "num_blocks": 9,
            "max_model_len": 99,
            "enable_prefix_caching": False,
            "cache_dir": None,
            "speculative": "ngram",
            "num_speculative_tokens": 2,
            "cascade_attention": False,
            "batch_invariant": True,
        }

    @pytest.mark.parametrize(
        ("asked", "is_taken"),
        [([], True), (["--disable-custom-all-reduce"], False), (["--batch-invariant"], False)],
    )
    def test_takes_peer_memory_where_it_serves(self, recorded, monkeypatch, asked, is_taken):
        taken = []
        monkeypatch.setattr(options, "why_no_peer_memory", lambda model: None)
        monkeypatch.setattr(options, "use_peer_memory", taken.append)
        assert main([*MODEL, "--max-tokens", "1", *asked, "a"]) == 0
        assert len(taken) == is_taken

    def test_leaves_sums_to_xla_where_it_does_not(self, recorded, monkeypatch):
        monkeypatch.delattr(options, "use_peer_memory")
        assert main([*MODEL, "--max-tokens", "1", "a"]) == 0

    def test_tells_a_terminal_how_fast_it_was(self, recorded, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        main([*MODEL, "--max-tokens", "3", "a", "b"])
        assert "6 tokens, the first after " in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ([*MODEL, "text"], "prompts[0] is text, but the model has no tokenizer.json. Pass token ids."),
            ([*MODEL, "--temperature", "-1", "a"], "temperature must be at least 0, got -1.0."),
            (["generate", "--model", "no/such/folder", "a"], "no/such/folder"),
            (["generate", "--model=no/such", "--max-tokens=0", "a"], "max_tokens must be positive, got 0."),
            ([*MODEL, "--tensor-parallel-size", "99", "a"], "tp * cp must be at most the number of devices"),
            ([*MODEL, "--tensor-parallel-size", "0", "a"], "tp must be positive, got 0."),
            ([*MODEL, "--cp-kv-cache-interleave-size", "0", "a"], "interleave_size must be positive, got 0."),
            (
                [*MODEL, "--tensor-parallel-size", "4", "--decode-context-parallel-size", "3", "a"],
                "tensor_parallel_size must be a multiple of decode_context_parallel_size (3), got 4.",
            ),
            (
                [*MODEL, "--decode-context-parallel-size", "0", "a"],
                "decode_context_parallel_size must be positive, got 0.",
            ),
        ],
    )
    def test_an_error_is_one_line_and_status_1(self, argv, message, capsys):
        assert main(argv) == 1
        err = capsys.readouterr().err
        assert message in err
        assert err.startswith("jattn: ")
        assert err.count("\n") == 1

    def test_says_that_a_cache_has_no_scales(self, tmp_path, capsys):
        save(one_layer_model(), tmp_path)
        command = [
            "generate",
            "--model",
            str(tmp_path),
            "--quantization",
            "fp8_e4m3",
            "--max-tokens",
            "1",
            "a",
        ]
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert out.startswith("> a\n")
        assert err.startswith("jattn: fp8_e4m3 cache: layers 0 have no scales and take 1")
        assert err.count("\n") == 1
        command[command.index("fp8_e4m3")] = "int8_static_v"
        assert main(command) == 1
        assert "jattn: kv_scales must have a v_scale per channel" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["a", "0,", "0;1", "1.5"])
    def test_layers_are_numbers(self, capsys, text):
        with pytest.raises(SystemExit, match="2"):
            main([*MODEL, f"--skip-layers={text}", "a"])
        told = f"argument --skip-layers: must be numbers with commas between, got {text!r}. See "
        assert told in capsys.readouterr().err

    def test_a_command_is_needed(self, capsys):
        with pytest.raises(SystemExit, match="2"):
            main([])
        assert "command" in capsys.readouterr().err


def test_several_prompts_are_printed_in_whole_lines_with_their_numbers():
    out = io.StringIO()
    printer = StreamPrinter(["a\nb\n", "c"], out.write)
    for index, text in ((1, "d"), (0, "e\n"), (1, "\nf\ng"), (0, "")):
        printer.on_token(index, 9, text)
    assert out.getvalue() == "[0] > a\n[0] > b\n[1] > c\n[0] e\n[1] d\n[1] f\n"
    printer.close()
    assert out.getvalue().endswith("[1] f\n[1] g\n")


def test_a_terminal_sees_prompts_dimmed():
    out = io.StringIO()
    StreamPrinter(["a"], out.write, has_colours=True)
    assert out.getvalue() == "\x1b[2m> a\x1b[0m\n"


class TestMain:
    def test_version(self, capsys):
        with pytest.raises(SystemExit, match="0"):
            main(["--version"])
        assert capsys.readouterr().out == f"jattn 0.1.0, jax {jax.__version__}\n"

    def test_it_is_not_needed(self, capsys, monkeypatch):
        right = importlib.metadata.version

        def none_of_jattn(name):
            if name == "jattn":
                raise importlib.metadata.PackageNotFoundError(name)
            return right(name)

        monkeypatch.setattr(importlib.metadata, "version", none_of_jattn)
        with pytest.raises(SystemExit):
            main(["--version"])
        assert capsys.readouterr().out == f"jattn of a checkout, jax {jax.__version__}\n"

    def test_dtype_is_the_model_s(self, tmp_path, monkeypatch, recorded):
        dtypes = []
        monkeypatch.setattr(Recorded, "__call__", lambda self, model, **_: dtypes.append(model.dtype) or self)
        save(one_layer_model(), tmp_path)
        assert main(["generate", "--model", str(tmp_path), "--dtype=float16", "--max-tokens=1", "a"]) == 0
        assert dtypes == [jax.numpy.float16]

    def test_a_draft_model_is_loaded_as_the_model_is(self, tmp_path, recorded, capsys):
        save(one_layer_model(), tmp_path)
        words = ["generate", f"--model={tmp_path}", f"--speculative={tmp_path}", "--dtype=float16", "a"]
        assert main(words) == 0
        assert recorded.options["speculative"].dtype == jax.numpy.float16
        assert capsys.readouterr().err == ""  # no bar: this is no terminal

    def test_an_interrupt_is_no_traceback(self, recorded, monkeypatch, capsys):
        def interrupted(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(recorded, "generate", interrupted)
        assert main([*MODEL, "a"]) == 130
        assert capsys.readouterr().err == "\n"


class TestDoctor:
    def test_names_the_version_the_devices_and_every_feature(self, capsys):
        assert main(["doctor"]) == 0
        out = capsys.readouterr().out
        assert f"jax {jax.__version__}" in out
        assert jax.devices()[0].device_kind in out
        for feature in doctor.FEATURES:
            assert any(line.startswith(feature + "  ") for line in out.splitlines())

    def test_options_of_an_engine_are_a_model_s(self, capsys):
        assert main(["doctor", "--quantization=fp8"]) == 1
        out, err = capsys.readouterr()
        told = "jattn: quantization must be left out without a model (--model DIR), got fp8.\n"
        assert (out, err) == ("", told)

    def test_of_a_model_every_bucket_has_its_table(self, capsys, monkeypatch):
        monkeypatch.setattr("jattn.models.loading.pretrained.load", None)  # weights are not needed
        options = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--quantization", "fp8_e4m3"]
        assert main(["doctor", "--model", str(GOLDEN / "hf" / "mistral"), *options]) == 0
        out = capsys.readouterr().out
        for bucket in ("4+0/0x32", "4+4/64x32"):
            assert bucket in out
        assert "4/2 heads of 32, window=(23, 0); float32 queries, NHD float8_e4m3fn x scale" in out
        assert "mosaic_gpu: the kernels need an NVIDIA GPU" in out

    def test_weights_of_a_draft_model_are_not_needed_either(self, capsys, monkeypatch):
        monkeypatch.setattr("jattn.serving.engine.served_model.load", None)
        folder = str(GOLDEN / "hf" / "mistral")
        sizes = ["--max-num-seqs=2", "--max-num-batched-tokens=32"]
        assert main(["doctor", f"--model={folder}", f"--speculative={folder}", *sizes]) == 0
        assert "buckets" in capsys.readouterr().out

    @pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU may have the kernels")
    def test_a_cpu_gets_xla_for_everything_and_is_told_why(self):
        for feature in doctor.FEATURES:
            for region in doctor.REGIONS:
                diagnosis = doctor.diagnose(feature, region)
                assert diagnosis.implementation == "xla", feature
                assert diagnosis.reason.startswith("mosaic_gpu")
                assert "cpu" in diagnosis.reason

    def test_reasons_are_notes_and_stand_there_once(self, monkeypatch):
        monkeypatch.setattr("pallas_kernels.support.why_not_on", lambda *_: None)  # as on a Hopper GPU
        out = doctor.report()
        (line,) = [line for line in out.splitlines() if line.startswith("layout packed")]
        assert line.split()[2:] == ["xla", "[1]", "xla", "[1]"]
        assert out.count("layout=packed is not supported; supported: NHD, HND") == 1
        assert "[2]" in out


@pytest.mark.kernels
def test_a_reader_that_stops_reading_is_no_error():
    """The pipe has no reader from the start, so the first write fails."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from jattn.serving.cli.main import main; sys.exit(main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert done.returncode == 0
    assert "Error" not in done.stderr
