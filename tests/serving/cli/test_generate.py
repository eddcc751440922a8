import io
import sys

import pytest

from jattn.models import save
from jattn.serving.cli import options
from jattn.serving.cli.generate import StreamPrinter
from jattn.serving.cli.main import main
from jattn.serving.engine.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.serving.tiny import one_layer_model

MODEL = ["generate", "--model", str(GOLDEN / "hf" / "llama")]


class TestGenerate:
    def test_prints_the_prompt_and_its_completion(self, recording_engine, capsys):
        assert main([*MODEL, "--max-tokens", "6", "def f("]) == 0
        (result,) = recording_engine.results
        assert len(result.token_ids) == 6
        assert capsys.readouterr().out == f"> def f(\n{result.text}\n"
        assert recording_engine.calls[0]["sampling_params"].is_greedy

    def test_reads_the_prompt_from_stdin_if_none_is_passed(self, recording_engine, capsys, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.StringIO("x = "))
        assert main([*MODEL, "--max-tokens", "2"]) == 0
        assert capsys.readouterr().out.startswith("> x = \n")

    def test_empty_stdin_is_an_error(self, recording_engine, capsys, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        assert main(MODEL) == 1
        assert capsys.readouterr().err == "jattn: No prompt given. Pass PROMPT, or pipe text to stdin.\n"

    def test_passes_sampling_and_engine_options_to_the_engine(self, recording_engine):
        options = [
            "--temperature=0.5",
            "--top-k=7",
            "--top-p=0.9",
            "--min-p=0.1",
            "--seed=3",
            "--stop=x",
            "--stop=yz",
        ]
        options += ["--implementation=xla", "--kv-cache-dtype=int8_token_head", "--skip-layers=0,-1"]
        options += ["--max-num-seqs=3", "--max-num-batched-tokens=40", "--block-size=8"]
        options += ["--num-blocks=9", "--max-model-len=99", "--no-enable-prefix-caching"]
        options += ["--speculative=ngram", "--num-speculative-tokens=2", "--no-cascade-attention"]
        options += ["--batch-invariant"]
        assert main([*MODEL, "--max-tokens", "1", *options, "a"]) == 0
        assert recording_engine.calls[0]["sampling_params"] == SamplingParams(
            temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=3, stop=("x", "yz")
        )
        assert recording_engine.options == {
            "implementation": "xla",
            "kv_cache_dtype": "int8_token_head",
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
            "seed": None,
        }

    @pytest.mark.parametrize(
        ("words", "uses_peer_memory"),
        [([], True), (["--disable-custom-all-reduce"], False), (["--batch-invariant"], False)],
    )
    def test_uses_peer_memory_if_it_is_available(
        self, recording_engine, monkeypatch, words, uses_peer_memory
    ):
        models = []
        monkeypatch.setattr(options, "why_not_peer_memory", lambda model: None)
        monkeypatch.setattr(options, "use_peer_memory", models.append)
        assert main([*MODEL, "--max-tokens", "1", *words, "a"]) == 0
        assert len(models) == uses_peer_memory

    def test_uses_xla_collectives_if_peer_memory_is_not_available(self, recording_engine, monkeypatch):
        monkeypatch.delattr(options, "use_peer_memory")
        assert main([*MODEL, "--max-tokens", "1", "a"]) == 0

    def test_prints_the_speed_on_a_terminal(self, recording_engine, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        main([*MODEL, "--max-tokens", "3", "a", "b"])
        assert "time to first token" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ([*MODEL, "text"], "prompts[0] is text, but the model has no tokenizer.json. Pass token ids."),
            ([*MODEL, "--temperature", "-1", "a"], "temperature must be in [0, 1e30], got -1.0."),
            (["generate", "--model", "no/such/folder", "a"], "no/such/folder"),
            (["generate", "--model=no/such", "--max-tokens=0", "a"], "max_tokens must be positive, got 0."),
            (
                [*MODEL, "--tensor-parallel-size", "99", "a"],
                "--tensor-parallel-size 99 needs 99 devices, but JAX has ",
            ),
            ([*MODEL, "--tensor-parallel-size", "0", "a"], "tp must be positive, got 0."),
            (
                [*MODEL, "--tensor-parallel-size", "4", "--decode-context-parallel-size", "3", "a"],
                "--tensor-parallel-size must be a multiple of --decode-context-parallel-size (3), got 4.",
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

    def test_warns_that_a_cache_has_no_scales(self, tmp_path, capsys):
        save(one_layer_model(), tmp_path)
        command = [
            "generate",
            "--model",
            str(tmp_path),
            "--kv-cache-dtype",
            "fp8_e4m3",
            "--max-tokens",
            "1",
            "a",
        ]
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert out.startswith("> a\n")
        assert err.startswith("jattn: fp8_e4m3 cache: layers 0 have no scales and use 1")
        assert err.count("\n") == 1
        command[command.index("fp8_e4m3")] = "int8_static_v"
        assert main(command) == 1
        assert "jattn: kv_scales must have a v_scale per channel" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["a", "0,", "0;1", "1.5"])
    def test_skip_layers_must_be_integers(self, capsys, text):
        with pytest.raises(SystemExit, match="2"):
            main([*MODEL, f"--skip-layers={text}", "a"])
        message = f"argument --skip-layers: must be comma-separated layer indices, got {text!r}. See "
        assert message in capsys.readouterr().err


def test_several_completions_are_printed_in_complete_lines_with_their_index():
    out = io.StringIO()
    printer = StreamPrinter(["a\nb\n", "c"], out.write)
    for index, text in ((1, "d"), (0, "e\n"), (1, "\nf\ng"), (0, "")):
        printer.on_token(index, 9, text)
    assert out.getvalue() == "[0] > a\n[0] > b\n[1] > c\n[0] e\n[1] d\n[1] f\n"
    printer.close()
    assert out.getvalue().endswith("[1] f\n[1] g\n")


def test_prompts_are_dimmed_on_a_terminal():
    out = io.StringIO()
    StreamPrinter(["a"], out.write, has_colors=True)
    assert out.getvalue() == "\x1b[2m> a\x1b[0m\n"
