/* The driver calls the shim intercepts or makes, declared by hand so that building it needs no CUDA
 * headers. Layouts are the driver's ABI (checked against cuda.h by the tests where it exists). */
#ifndef OVERLAPCTL_DRIVER_API_H
#define OVERLAPCTL_DRIVER_API_H

#include <stddef.h>

typedef int CUresult;
typedef int CUdevice;
typedef struct CUfunc_st *CUfunction;
typedef struct CUkern_st *CUkernel;
typedef struct CUstream_st *CUstream;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUgreenCtx_st *CUgreenCtx;
typedef struct CUdevResourceDesc_st *CUdevResourceDesc;

enum { CU_OK = 0 };

enum {
  CU_FUNC_SHARED_SIZE_BYTES = 1,
  CU_FUNC_NUM_REGS = 4,
  CU_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
  CU_FUNC_REQUIRED_CLUSTER_WIDTH = 11,
  CU_FUNC_REQUIRED_CLUSTER_HEIGHT = 12,
  CU_FUNC_REQUIRED_CLUSTER_DEPTH = 13
};

enum {
  CU_DEVICE_WARP_SIZE = 10,
  CU_DEVICE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
  CU_DEVICE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
  CU_DEVICE_MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
  CU_DEVICE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  CU_DEVICE_MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
  CU_DEVICE_RESERVED_SHARED_MEMORY_PER_BLOCK = 111
};

enum {
  CU_ATTR_COOPERATIVE = 2,
  CU_ATTR_CLUSTER_DIMENSION = 4,
  CU_ATTR_PRIORITY = 8,
  CU_ATTR_PREFERRED_CLUSTER_DIMENSION = 11,
  CU_ATTR_PREFERRED_SHARED_MEMORY_CARVEOUT = 14
};

enum { CU_RESOURCE_TYPE_SM = 1 };

typedef union CUlaunchAttributeValue {
  char bytes[64];
  int number; /* cooperative, priority, carve-out */
  struct {
    unsigned x, y, z;
  } cluster;
} CUlaunchAttributeValue;

typedef struct CUlaunchAttribute {
  int id;
  char pad[4];
  CUlaunchAttributeValue value;
} CUlaunchAttribute;

typedef struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute *attrs;
  unsigned numAttrs;
} CUlaunchConfig;

/* Opaque but for the SM count; larger than any version of the driver's structure. */
typedef struct CUdevResource {
  int type;
  unsigned char internal[92];
  unsigned sm_count;
  unsigned char rest[1024 - 100];
} CUdevResource;

_Static_assert(sizeof(CUlaunchAttribute) == 72, "driver ABI");
_Static_assert(offsetof(CUlaunchAttribute, value) == 8, "driver ABI");
_Static_assert(sizeof(CUlaunchConfig) == 56, "driver ABI");
_Static_assert(offsetof(CUlaunchConfig, hStream) == 32, "driver ABI");

typedef CUresult (*ovl_launch_fn)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                  unsigned, unsigned, CUstream, void **, void **);
typedef CUresult (*ovl_launch_ex_fn)(const CUlaunchConfig *, CUfunction, void **, void **);
typedef CUresult (*ovl_coop_fn)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                unsigned, unsigned, CUstream, void **);
typedef CUresult (*ovl_unload_fn)(void *);
typedef CUresult (*ovl_capture_begin_fn)(CUstream, int);
typedef CUresult (*ovl_capture_to_graph_fn)(CUstream, CUgraph, const CUgraphNode *, const void *,
                                            size_t, int);
typedef CUresult (*ovl_capture_end_fn)(CUstream, CUgraph *);
typedef CUresult (*ovl_graph_fn)(CUgraphExec, CUstream);
typedef CUresult (*ovl_partition_fn)(CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned);

#endif
