"""Kernels that overlapctl brings along: compute workloads and light communication kernels.

========================  =====================================================================
``triton_gemm``           Plain Triton GEMM, one block per tile; the compute side of trials.
``triton_elementwise``    ``y = x * scale + shift``, bound by memory bandwidth.
``light_all_reduce``      All-reduce over symmetric memory that fits beside compute blocks.
``one_warp``              Bulk copy and add by one warp per block: fits beside a persistent GEMM.
``standin``               A copy within one GPU with the footprint of an NCCL kernel.
``cuda_module``           Compiles (NVRTC), loads and launches the ``.cu`` files of this folder.
========================  =====================================================================

Names of communication kernels start with ``overlapctl_comm_``: that is how the shim knows them.
Nothing here imports torch, triton or cuda before a kernel is asked for.
"""
