"""Attention kernels for NVIDIA GPUs: functions of arrays, independent of engines, requests and models."""

from pallas_kernels.architectures import target as target
