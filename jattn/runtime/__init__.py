"""Run steps: decode graphs, their executables, host-to-device transfer and the decode loop."""
