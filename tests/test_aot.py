"""Tests that compile kernels fail, instead of being skipped, if no kernel can be compiled."""

import pytest

from tests import aot


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Return a folder with the plugin but no compiler, on a machine without a CUDA toolkit."""
    folder = tmp_path / "jax_cuda13_plugin"
    monkeypatch.setattr(aot, "plugin_folder", lambda: folder)
    monkeypatch.setenv("PATH", "")
    return folder


def test_no_plugin_is_a_failure_that_names_its_wheels(monkeypatch):
    monkeypatch.setattr(aot, "plugin_folder", lambda: None)
    with pytest.raises(pytest.fail.Exception, match="needs the wheels jax-cuda13-plugin and"):
        aot.require_plugin()


def test_no_ptxas_is_a_failure_that_names_its_wheels(plugin):
    with pytest.raises(pytest.fail.Exception, match="needs ptxas, of the wheels nvidia-cuda-nvcc"):
        aot.require_plugin()


def test_the_wheels_ptxas_comes_before_a_toolkits(plugin, monkeypatch, tmp_path):
    for folder in (tmp_path / "toolkit", plugin.parent / "nvidia" / "cu13" / "bin"):
        folder.mkdir(parents=True)
        (folder / "ptxas").touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "toolkit"))
        aot.require_plugin()
        assert aot.shutil.which("ptxas", path=aot.compiler_path(plugin)) == str(folder / "ptxas")
