"""Records of no real machine, for every test that needs one."""

from kernarc.harness.run.records import Environment


def made_up_environment() -> Environment:
    """Two cores, no GPU, no git."""
    return Environment(
        hostname="host",
        platform="Linux",
        cpu_model="cpu",
        cpu_count=2,
        cpu_governor=None,
        memory_total_bytes=1,
        gpu_name=None,
        gpu_driver=None,
        gpu_memory_bytes=None,
        python_version="3.11",
        library_versions={},
        kernarc_version="0.1.0",
        git_commit=None,
        git_dirty=None,
    )
