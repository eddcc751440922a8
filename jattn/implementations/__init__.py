"""The ways to compute attention that `attend` chooses from; each meets the same contract."""
