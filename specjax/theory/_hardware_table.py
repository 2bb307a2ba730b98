"""Devices and their published numbers.

Rates are dense peaks. Bandwidths and rates are decimal (1 TB/s = 1e12 bytes/s), links
one-way. Capacities are as advertised, decimal unless the source says GiB.
"""

from types import MappingProxyType

from specjax.theory._hardware import Hardware

_T = 1e12
_G = 1e9
_GIB = 2.0**30
_CLOUD_TPU = "Google Cloud TPU documentation, docs.cloud.google.com/tpu/docs/"
_ONE_WAY = "Link: half of the bidirectional figure, all links of the chip together."

_NVIDIA = (
    Hardware(
        name="a100-80gb",
        memory_bytes=80 * _G,
        bandwidth_bytes_per_s=2.039 * _T,
        fp32_flops_per_s=19.5 * _T,
        bf16_flops_per_s=312 * _T,
        int8_flops_per_s=624 * _T,
        link_bytes_per_s=300 * _G,
        source="NVIDIA A100 data sheet as quoted by glennklockwood.com/garden",
        certainty="reported",
        note="SXM. NVLink 3, 300 + 300 GB/s.",
    ),
    Hardware(
        name="h100-sxm",
        memory_bytes=80 * _G,
        bandwidth_bytes_per_s=3.35 * _T,
        fp32_flops_per_s=67 * _T,
        bf16_flops_per_s=989.5 * _T,
        fp8_flops_per_s=1979 * _T,
        int8_flops_per_s=1979 * _T,
        link_bytes_per_s=450 * _G,
        source="NVIDIA H100 data sheet (halved: it states rates with sparsity) as "
        "quoted by glennklockwood.com/garden",
        certainty="reported",
        note="NVLink 4, 900 GB/s both ways; 749 GB/s seen between two devices.",
    ),
    Hardware(
        name="h200-sxm",
        memory_bytes=141 * _G,
        bandwidth_bytes_per_s=4.8 * _T,
        fp32_flops_per_s=67 * _T,
        bf16_flops_per_s=989.5 * _T,
        fp8_flops_per_s=1979 * _T,
        int8_flops_per_s=1979 * _T,
        link_bytes_per_s=450 * _G,
        measured_bandwidth_bytes_per_s=4.3 * _T,
        measured_bf16_flops_per_s=788 * _T,
        source="NVIDIA H200 data sheet (halved: it states rates with sparsity); "
        "arithmetic as H100",
        certainty="reported",
        note="The measured rates were seen on one device: a copy, and bf16 products.",
    ),
    Hardware(
        name="b200",
        memory_bytes=180 * _G,
        bandwidth_bytes_per_s=7.7 * _T,
        fp32_flops_per_s=80 * _T,
        bf16_flops_per_s=2250 * _T,
        fp8_flops_per_s=4500 * _T,
        fp4_flops_per_s=9000 * _T,
        link_bytes_per_s=900 * _G,
        source="NVIDIA HGX B200 (1000 W) as quoted by glennklockwood.com/garden and "
        "docs.vultr.com; link by an MLPerf system description",
        certainty="reported",
        note="Bandwidth is quoted as 7.7 to 8 TB/s; the lower is taken. 192 GB raw.",
    ),
    Hardware(
        name="gb200",
        memory_bytes=186 * _G,
        bandwidth_bytes_per_s=8 * _T,
        fp32_flops_per_s=90 * _T,
        bf16_flops_per_s=2500 * _T,
        fp8_flops_per_s=5000 * _T,
        fp4_flops_per_s=10000 * _T,
        link_bytes_per_s=900 * _G,
        source="NVIDIA GB200 (1200 W a GPU) as quoted by glennklockwood.com/garden",
        certainty="reported",
        note="One of the GPUs. The capacity is recalled.",
    ),
    Hardware(
        name="gb10",
        memory_bytes=128 * _G,
        bandwidth_bytes_per_s=273 * _G,
        fp32_flops_per_s=31 * _T,
        link_bytes_per_s=25 * _G,
        measured_bandwidth_bytes_per_s=231 * _G,
        source="NVIDIA DGX Spark specifications; measured reads as reported in "
        "github.com/antirez/ds4/issues/773 (231 to 234 GB/s)",
        certainty="reported",
        note="DGX Spark, one box; memory is shared with the CPU. The maker states "
        "1 PFLOP/s of fp4 with sparsity only, so the bf16 rate is not known: measure "
        "it. fp32 is approximate. Link: one 200 Gb/s ConnectX-7 port.",
    ),
)

_TPU = (
    Hardware(
        name="tpu-v5e",
        memory_bytes=16 * _G,
        bandwidth_bytes_per_s=819 * _G,
        bf16_flops_per_s=197 * _T,
        int8_flops_per_s=393 * _T,
        link_bytes_per_s=200 * _G,
        source=_CLOUD_TPU + "v5e",
        certainty="confirmed",
        note=_ONE_WAY,
    ),
    Hardware(
        name="tpu-v5p",
        memory_bytes=95 * _G,
        bandwidth_bytes_per_s=2765 * _G,
        bf16_flops_per_s=459 * _T,
        int8_flops_per_s=918 * _T,
        link_bytes_per_s=600 * _G,
        source=_CLOUD_TPU + "v5p",
        certainty="confirmed",
        note="The int8 rate is recalled. " + _ONE_WAY,
    ),
    Hardware(
        name="tpu-v6e",
        memory_bytes=32 * _G,
        bandwidth_bytes_per_s=1638 * _G,
        bf16_flops_per_s=918 * _T,
        int8_flops_per_s=1836 * _T,
        link_bytes_per_s=400 * _G,
        source=_CLOUD_TPU + "v6e",
        certainty="confirmed",
        note=_ONE_WAY,
    ),
    Hardware(
        name="tpu7x",
        memory_bytes=192 * _GIB,
        bandwidth_bytes_per_s=7380 * _G,
        bf16_flops_per_s=2307 * _T,
        fp8_flops_per_s=4614 * _T,
        link_bytes_per_s=600 * _G,
        source=_CLOUD_TPU + "tpu7x",
        certainty="confirmed",
        note="The bandwidth and the link are quoted at second hand. " + _ONE_WAY,
    ),
)

#: Known devices by name.
HARDWARE = MappingProxyType({h.name: h for h in (*_NVIDIA, *_TPU)})


def get_hardware(name: str) -> Hardware:
    """Finds a device of the table.

    Args:
      name: a key of ``HARDWARE``, in any case, ``_`` and blanks as ``-``.

    Returns:
      The device, one of it.

    Raises:
      ValueError: the name is unknown; the message lists the known ones.
    """
    key = str(name).strip().lower().replace("_", "-").replace(" ", "-")
    if key not in HARDWARE:
        raise ValueError(
            f"hardware {name!r} is unknown; known are {', '.join(HARDWARE)}. Make "
            "your own with Hardware(...) or measure_hardware()."
        )
    return HARDWARE[key]
