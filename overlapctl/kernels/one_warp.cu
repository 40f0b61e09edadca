// Bulk copy and bulk add by one thread per block (sm_90 and newer).
//
// A block is one warp, and one thread of it drives the bulk-copy unit: each chunk goes from global
// memory into a ring in shared memory (cp.async.bulk, completion by mbarrier) and from there out
// again, as a plain write or as a reduction that the L2 of the destination's GPU performs
// (cp.reduce.async.bulk). No data passes through registers, so the block asks for very little and
// finds room on an SM beside a persistent GEMM block.
//
// Footprint: 32 threads, at most 18 registers (CUDA 13.0 and 13.5 give it 6), 16 KiB + 128 B static
// shared memory. The host checks it after loading. Fewer registers are better: a persistent GEMM
// leaves about 256 for each quarter of an SM. That is why the bytes behind the last 16-byte unit
// have a kernel of their own.
//
// Requirements: source and destination aligned to 16 bytes and not overlapping; a multiple of 16
// bytes for the bulk kernels, fewer than 16 (for the adds: whole elements) for the tail kernels.
// Destination may be memory of a peer GPU. Each 16-byte unit is touched by exactly one block. Adds
// round to nearest even; fp32 subnormals are flushed to zero by the reduction unit, bf16 and fp16
// subnormals are kept.

namespace {

constexpr unsigned kStages = 4;
constexpr unsigned kStageBytes = 4096;
// Chunks requested ahead. The slot of chunk k + kAhead last held chunk k + kAhead - kStages, whose
// write-out must have finished *reading* the ring: kStages - kAhead younger ones may be under way.
constexpr unsigned kAhead = 2;
constexpr unsigned kPendingWrites = kStages - kAhead;

enum class Op { kCopy, kAddBf16, kAddFp16, kAddFp32 };

struct alignas(128) Ring {
  unsigned char slot[kStages][kStageBytes];
  unsigned long long full[kStages];
};

__device__ __forceinline__ unsigned shared_address(const void *p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(unsigned barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// Makes the initialised barriers visible to the bulk-copy unit (async proxy).
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "retry:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra retry;\n"
               "}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}

__device__ __forceinline__ void bulk_load(unsigned slot, const unsigned char *source,
                                          unsigned bytes, unsigned barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];" ::"r"(slot),
               "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
               : "memory");
}

template <Op kOp>
__device__ __forceinline__ void bulk_store(unsigned char *target, unsigned slot, unsigned bytes) {
  const unsigned long long address = __cvta_generic_to_global(target);
  if constexpr (kOp == Op::kCopy) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(address),
                 "r"(slot), "r"(bytes)
                 : "memory");
  } else if constexpr (kOp == Op::kAddBf16) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 "
                 "[%0], [%1], %2;" ::"l"(address),
                 "r"(slot), "r"(bytes)
                 : "memory");
  } else if constexpr (kOp == Op::kAddFp16) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 "
                 "[%0], [%1], %2;" ::"l"(address),
                 "r"(slot), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                 "[%0], [%1], %2;" ::"l"(address),
                 "r"(slot), "r"(bytes)
                 : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The tail is shorter than a 16-byte unit: thread i takes element i.
template <Op kOp>
__device__ __forceinline__ void run_tail(unsigned char *target, const unsigned char *source,
                                         unsigned tail_bytes) {
  const unsigned index = threadIdx.x;
  if constexpr (kOp == Op::kCopy) {
    if (index < tail_bytes) {
      target[index] = source[index];
    }
  } else if constexpr (kOp == Op::kAddFp32) {
    if (index * 4 < tail_bytes) {
      const float value = reinterpret_cast<const float *>(source)[index];
      const unsigned long long address = __cvta_generic_to_global(target + index * 4);
      asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
    }
  } else {
    if (index * 2 < tail_bytes) {
      const unsigned short value = reinterpret_cast<const unsigned short *>(source)[index];
      const unsigned long long address = __cvta_generic_to_global(target + index * 2);
      if constexpr (kOp == Op::kAddBf16) {
        asm volatile("red.global.add.noftz.bf16 [%0], %1;" ::"l"(address), "h"(value) : "memory");
      } else {
        asm volatile("red.global.add.noftz.f16 [%0], %1;" ::"l"(address), "h"(value) : "memory");
      }
    }
  }
}

template <Op kOp>
__device__ __forceinline__ void run(unsigned char *target, const unsigned char *source,
                                    unsigned long long bytes) {
  __shared__ Ring ring;
  if (threadIdx.x != 0) {
    return;
  }

  const unsigned slots = shared_address(&ring.slot[0][0]);
  const unsigned barriers = shared_address(&ring.full[0]);
  for (unsigned stage = 0; stage < kStages; ++stage) {
    barrier_init(barriers + stage * 8);
  }
  barrier_init_fence();

  // Block b moves chunks b, b + gridDim.x, ...; the k-th of them uses slot k % kStages.
  const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * kStageBytes;
  const unsigned long long first = static_cast<unsigned long long>(blockIdx.x) * kStageBytes;

  auto chunk_bytes = [&](unsigned long long offset) {
    const unsigned long long left = bytes - offset;
    return left < kStageBytes ? static_cast<unsigned>(left) : kStageBytes;
  };
  auto load = [&](unsigned long long offset, unsigned slot) {
    if (offset < bytes) {
      bulk_load(slots + slot * kStageBytes, source + offset, chunk_bytes(offset),
                barriers + slot * 8);
    }
  };

  for (unsigned k = 0; k < kAhead; ++k) {
    load(first + k * stride, k);
  }
  unsigned slot = 0;
  unsigned parity = 0;
  for (unsigned long long offset = first; offset < bytes; offset += stride) {
    barrier_wait(barriers + slot * 8, parity);
    bulk_store<kOp>(target + offset, slots + slot * kStageBytes, chunk_bytes(offset));
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPendingWrites) : "memory");
    load(offset + kAhead * stride, (slot + kAhead) % kStages);
    slot = (slot + 1) % kStages;
    parity ^= slot == 0;
  }
  // The writes themselves, not only the reads of the ring, are complete before the block ends.
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

} // namespace

#define OVERLAPCTL_ONE_WARP(suffix, op)                                                            \
  extern "C" __global__ void __launch_bounds__(32) overlapctl_comm_one_warp_##suffix(              \
      unsigned char *target, const unsigned char *source, unsigned long long bytes) {              \
    run<op>(target, source, bytes);                                                                \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(32) overlapctl_comm_one_warp_tail_##suffix(         \
      unsigned char *target, const unsigned char *source, unsigned long long bytes) {              \
    run_tail<op>(target, source, static_cast<unsigned>(bytes));                                    \
  }

OVERLAPCTL_ONE_WARP(copy, Op::kCopy)
OVERLAPCTL_ONE_WARP(add_bf16, Op::kAddBf16)
OVERLAPCTL_ONE_WARP(add_fp16, Op::kAddFp16)
OVERLAPCTL_ONE_WARP(add_fp32, Op::kAddFp32)
