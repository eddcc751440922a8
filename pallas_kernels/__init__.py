"""Attention kernels for NVIDIA GPUs: functions of arrays that know nothing of requests or models."""
