// A copy within one GPU that asks for as much of an SM as an NCCL 2.28 collective kernel does, so
// that one GPU is enough to see what shaping and priority do for such a kernel.
//
// Footprint: 544 threads, 89-96 registers (allocated as 96), no static shared memory; the launch
// adds 103,808 B of dynamic shared memory (NCCL 2.28.9 on sm_90: 21,568 B static and 82,240 B
// dynamic), which is held and not used. The host checks threads and registers after loading.
//
// Every thread has kVectors 16-byte loads in flight before it stores them, as NCCL's unrolled
// copy loops have; that is also what makes the kernel need its registers. A block paces itself:
// its n-th tile is not begun before n * ns_per_tile (0: as fast as it goes).

namespace {

constexpr unsigned kThreads = 544;
constexpr unsigned kVectors = 20;
constexpr unsigned kTileVectors = kThreads * kVectors;

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ uint4 load(const uint4 *p) {
  uint4 v;
  // volatile: the loads stay together, ahead of the stores.
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

} // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    overlapctl_comm_standin(unsigned char *target, const unsigned char *source,
                            unsigned long long bytes, float ns_per_tile) {
  const unsigned long long vectors = bytes / 16;
  const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * kTileVectors;
  const unsigned long long start = nanoseconds();
  float due = 0.0f;

  for (unsigned long long tile = static_cast<unsigned long long>(blockIdx.x) * kTileVectors;
       tile < vectors; tile += stride) {
    if (ns_per_tile > 0.0f) {
      if (threadIdx.x == 0) {
        while (static_cast<float>(nanoseconds() - start) < due) {
          __nanosleep(200);
        }
      }
      __syncthreads();
      due += ns_per_tile;
    }

    const uint4 *from = reinterpret_cast<const uint4 *>(source) + tile + threadIdx.x;
    uint4 *to = reinterpret_cast<uint4 *>(target) + tile + threadIdx.x;
    if (tile + kTileVectors <= vectors) {
      uint4 held[kVectors];
#pragma unroll
      for (unsigned i = 0; i < kVectors; ++i) {
        held[i] = load(from + i * kThreads);
      }
#pragma unroll
      for (unsigned i = 0; i < kVectors; ++i) {
        to[i * kThreads] = held[i];
      }
    } else {
      for (unsigned i = 0; tile + threadIdx.x + i * kThreads < vectors; ++i) {
        to[i * kThreads] = load(from + i * kThreads);
      }
    }
  }

  // The last bytes that fill no 16-byte vector.
  const unsigned tail = static_cast<unsigned>(bytes - vectors * 16);
  if (blockIdx.x == 0 && threadIdx.x < tail) {
    target[vectors * 16 + threadIdx.x] = source[vectors * 16 + threadIdx.x];
  }
}
