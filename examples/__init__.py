"""Programs that show how jattn is used; run them with `python -m examples.NAME`."""
