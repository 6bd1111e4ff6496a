// The TMA descriptors of the tensors (inter_chunk_sm90.cuh's Maps), for launch_sm90.cu and launch_sm90_tiles.cu.
#pragma once

#include <algorithm>

#include "inter_chunk_sm90.cuh"
#include "tensor_map.cuh"
#include "dispatch.h"

namespace gdn {

// Throws if the driver cannot make a map; there is no slower fallback.

// [num_tokens, heads, 128] of tokens, `stride` elements from a token to the next, for tma_load_box: 64 tokens of one head, `halves` times 64 columns; tokens from num_tokens on are
// zeros.
inline void make_map(CUtensorMap& map, const void* base, int64_t num_tokens, int heads, int64_t stride, uint32_t halves) {
  const cuuint64_t tokens = static_cast<cuuint64_t>(num_tokens), count = static_cast<cuuint64_t>(heads);
  check(flashcore::make_tensor_map<4>(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, base, {64, tokens, 2, count},
                                      {static_cast<cuuint64_t>(stride) * 2, 128, HEAD_DIM * 2}, {64, CHUNK, halves, 1}));
}

// All states' rows for tma_load_state: 64 or 128 of them, in four blocks of 32 columns. Or those of a pool's slot for
// tma_load_box, of bf16 in two blocks of 64, or `rows` columns of a head's [K, V]; heads may lie apart by any number of rows. `states`: the dense ones, before or after.
template <typename Problem>
void make_state_map(CUtensorMap& map, const Problem& p, uint32_t rows, const float* states) {
  if constexpr (POOL) {
    const bool half = p.state_blocks() == 2;
    const cuuint32_t columns = half ? 64 : 32, blocks = half ? 2 : 4;
    const cuuint32_t box = p.is_k_first() ? std::max(rows / columns, 1u) : blocks, lines = p.is_k_first() ? HEAD_DIM : rows;
    const cuuint64_t row = half ? HEAD_DIM * 2 : HEAD_DIM * 4, slots = static_cast<cuuint64_t>(p.slots);
    return check(flashcore::make_tensor_map<4>(
        map, half ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, p.pool,
        {columns, static_cast<cuuint64_t>(p.state_row(p.HV - 1)) + HEAD_DIM, blocks, slots},
        {row, 128, static_cast<cuuint64_t>(p.slot_stride) * (half ? 2 : 4)}, {columns, lines, box, 1}));
  } else
  check(flashcore::make_tensor_map<3>(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, states,
                                      {32, static_cast<cuuint64_t>(p.N) * p.HV * HEAD_DIM, HEAD_DIM / 32}, {HEAD_DIM * 4, 128},
                                      {32, rows, HEAD_DIM / 32}));
}

// With boxes for one warpgroup, and for two.
inline void make_maps(const Prefill& p, Maps& one, Maps& two) {
  make_map(one.q, p.q, p.num_tokens, p.H, p.qk_stride(), 2), make_map(one.k, p.k, p.num_tokens, p.H, p.qk_stride(), 2);
  make_map(one.v, p.v, p.num_tokens, p.HV, p.v_stride(), 1), make_map(two.v, p.v, p.num_tokens, p.HV, p.v_stride(), 2);
  two.q = one.q, two.k = one.k;
}

}  // namespace gdn

#pragma GCC visibility push(hidden)
namespace gdn {

// launch_sm90_tiles.cu: both kernels with the tile scheduler, no sequence split. Returns false, without a launch, if the half tiles
// are at most one wave.
bool launch_sm90_tiles(Prefill p, Maps one, Maps two, const Allocate& allocate, int device, cudaStream_t stream);

// launch_sm90_fused.cu: one kernel instead of two, no sequence split. Returns false, without a launch, if there are more
// sequences than it can sort.
bool launch_sm90_fused(Prefill p, Maps one, const Allocate& allocate, int device, cudaStream_t stream);

}  // namespace gdn
#pragma GCC visibility pop
