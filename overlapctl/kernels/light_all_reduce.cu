// All-reduce (sum) in place over symmetric memory, by few, light blocks.
//
// Rank r owns the r-th slice of the buffer: it reads that slice from every rank, sums in fp32 in
// rank order and writes the sum to every rank. Reading and writing are one pass, because an
// element of the slice is read and written by the same thread only. All ranks end up with the
// same bits. Per direction each GPU moves 2 * (ranks - 1) / ranks of the buffer.
//
// Barriers: block b of one rank meets block b of every other rank, before the pass (the inputs
// are there) and after it (the sums have arrived). Blocks meet only their namesakes and the
// hardware hands blocks out in ascending order, so the kernel goes on even if only some of its
// blocks find room at first. A signal is one word per (block, sender), set 0 -> 1 by the sender
// and reset 1 -> 0 by the receiver: the pad is clean when the kernel ends.
//
// Footprint: 512 threads, at most 40 registers, no shared memory. The host checks it.
//
// Requirements: buffers aligned to 16 bytes; the same grid on every rank; gridDim.x * ranks words
// in the signal pad; nothing else uses that pad at the same time.

namespace {

constexpr unsigned kThreads = 512;
constexpr unsigned kUnroll = 2;

enum class Type { kBf16, kFp16, kFp32 };

template <Type kType> struct Vector {
  static constexpr unsigned kElements = kType == Type::kFp32 ? 4 : 8;
  static constexpr unsigned kElementBytes = 16 / kElements;
};

// --- barrier --------------------------------------------------------------------------------

__device__ __forceinline__ unsigned swap_if_release(unsigned *word, unsigned old, unsigned value) {
  unsigned seen;
  asm volatile("atom.global.release.sys.cas.b32 %0, [%1], %2, %3;"
               : "=r"(seen)
               : "l"(word), "r"(old), "r"(value)
               : "memory");
  return seen;
}

__device__ __forceinline__ unsigned swap_if_acquire(unsigned *word, unsigned old, unsigned value) {
  unsigned seen;
  asm volatile("atom.global.acquire.sys.cas.b32 %0, [%1], %2, %3;"
               : "=r"(seen)
               : "l"(word), "r"(old), "r"(value)
               : "memory");
  return seen;
}

__device__ __forceinline__ void meet_namesakes(unsigned *const *pads, unsigned rank,
                                               unsigned ranks) {
  // Everything the block wrote comes before the release of the threads that signal.
  __syncthreads();
  for (unsigned peer = threadIdx.x; peer < ranks; peer += kThreads) {
    if (peer != rank) {
      unsigned *theirs = pads[peer] + blockIdx.x * ranks + rank;
      while (swap_if_release(theirs, 0, 1) != 0) {
      }
      unsigned *mine = pads[rank] + blockIdx.x * ranks + peer;
      while (swap_if_acquire(mine, 1, 0) != 1) {
      }
    }
  }
  __syncthreads();
}

// --- arithmetic -----------------------------------------------------------------------------

template <Type kType> __device__ __forceinline__ float low(unsigned pair) {
  if constexpr (kType == Type::kBf16) {
    return __uint_as_float(pair << 16);
  } else {
    float value;
    asm("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %1;\n cvt.f32.f16 %0, lo;}"
        : "=f"(value)
        : "r"(pair));
    return value;
  }
}

template <Type kType> __device__ __forceinline__ float high(unsigned pair) {
  if constexpr (kType == Type::kBf16) {
    return __uint_as_float(pair & 0xffff0000u);
  } else {
    float value;
    asm("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %1;\n cvt.f32.f16 %0, hi;}"
        : "=f"(value)
        : "r"(pair));
    return value;
  }
}

template <Type kType> __device__ __forceinline__ unsigned pack(float lo, float hi) {
  unsigned pair;
  if constexpr (kType == Type::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  }
  return pair;
}

template <Type kType> __device__ __forceinline__ void add(float *sum, const uint4 &v) {
  const unsigned word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    if constexpr (kType == Type::kFp32) {
      sum[i] += __uint_as_float(word[i]);
    } else {
      sum[2 * i] += low<kType>(word[i]);
      sum[2 * i + 1] += high<kType>(word[i]);
    }
  }
}

template <Type kType> __device__ __forceinline__ uint4 rounded(const float *sum) {
  if constexpr (kType == Type::kFp32) {
    return make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                      __float_as_uint(sum[3]));
  } else {
    return make_uint4(pack<kType>(sum[0], sum[1]), pack<kType>(sum[2], sum[3]),
                      pack<kType>(sum[4], sum[5]), pack<kType>(sum[6], sum[7]));
  }
}

// Peers change these buffers between kernels: never from L1 (nor the read-only cache).
__device__ __forceinline__ uint4 load(const unsigned char *p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// --- the pass -------------------------------------------------------------------------------

template <Type kType, unsigned kCount>
__device__ __forceinline__ void reduce_vectors(unsigned char *const *buffers, unsigned ranks,
                                               unsigned long long at, unsigned long long stride) {
  float sum[kCount][Vector<kType>::kElements] = {};
#pragma unroll 1 // unrolled over ranks it would need more registers than the footprint allows
  for (unsigned peer = 0; peer < ranks; ++peer) {
    const unsigned char *from = buffers[peer] + at;
    uint4 held[kCount];
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      held[i] = load(from + i * stride);
    }
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      add<kType>(sum[i], held[i]);
    }
  }
  uint4 result[kCount];
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    result[i] = rounded<kType>(sum[i]);
  }
#pragma unroll 1
  for (unsigned peer = 0; peer < ranks; ++peer) {
    unsigned char *to = buffers[peer] + at;
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      *reinterpret_cast<uint4 *>(to + i * stride) = result[i];
    }
  }
}

// The elements behind the last whole vector: one thread of the last rank sums each.
template <Type kType>
__device__ __forceinline__ void reduce_element(unsigned char *const *buffers, unsigned ranks,
                                               unsigned long long at) {
  float sum = 0.0f;
  for (unsigned peer = 0; peer < ranks; ++peer) {
    if constexpr (kType == Type::kFp32) {
      sum += *reinterpret_cast<const volatile float *>(buffers[peer] + at);
    } else {
      sum += low<kType>(*reinterpret_cast<const volatile unsigned short *>(buffers[peer] + at));
    }
  }
  for (unsigned peer = 0; peer < ranks; ++peer) {
    if constexpr (kType == Type::kFp32) {
      *reinterpret_cast<float *>(buffers[peer] + at) = sum;
    } else {
      *reinterpret_cast<unsigned short *>(buffers[peer] + at) =
          static_cast<unsigned short>(pack<kType>(sum, 0.0f));
    }
  }
}

template <Type kType>
__device__ __forceinline__ void run(unsigned char *const *bases, unsigned *const *pads,
                                    unsigned rank, unsigned ranks, unsigned long long offset,
                                    unsigned long long elements) {
  meet_namesakes(pads, rank, ranks);

  const unsigned long long vectors = elements / Vector<kType>::kElements;
  const unsigned long long share = (vectors + ranks - 1) / ranks;
  const unsigned long long first = rank * share < vectors ? rank * share : vectors;
  const unsigned long long last = first + share < vectors ? first + share : vectors;

  const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * kThreads;
  unsigned long long v = first + blockIdx.x * kThreads + threadIdx.x;
  for (; v + (kUnroll - 1) * step < last; v += kUnroll * step) {
    reduce_vectors<kType, kUnroll>(bases, ranks, offset + v * 16, step * 16);
  }
  for (; v < last; v += step) {
    reduce_vectors<kType, 1>(bases, ranks, offset + v * 16, 0);
  }

  const unsigned rest = static_cast<unsigned>(elements - vectors * Vector<kType>::kElements);
  if (rank == ranks - 1 && blockIdx.x == 0 && threadIdx.x < rest) {
    reduce_element<kType>(bases, ranks,
                          offset + vectors * 16 + threadIdx.x * Vector<kType>::kElementBytes);
  }

  meet_namesakes(pads, rank, ranks);
}

} // namespace

#define OVERLAPCTL_LIGHT_ALL_REDUCE(name, type)                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, 3)                                        \
      name(unsigned char *const *bases, unsigned *const *pads, unsigned rank, unsigned ranks,      \
           unsigned long long offset, unsigned long long elements) {                               \
    run<type>(bases, pads, rank, ranks, offset, elements);                                         \
  }

OVERLAPCTL_LIGHT_ALL_REDUCE(overlapctl_comm_light_all_reduce_bf16, Type::kBf16)
OVERLAPCTL_LIGHT_ALL_REDUCE(overlapctl_comm_light_all_reduce_fp16, Type::kFp16)
OVERLAPCTL_LIGHT_ALL_REDUCE(overlapctl_comm_light_all_reduce_fp32, Type::kFp32)
