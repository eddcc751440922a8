"""Implementations of attention that `attend` chooses from; all satisfy the same contract."""
