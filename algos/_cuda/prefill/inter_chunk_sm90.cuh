// From chunk to chunk on Hopper: the arithmetic of inter_chunk_sm80.cuh with wgmma, for 64 rows of V.
//
//   R = beta (V - e^G K S^T),   D = R + (T - I) R,   O = scale e^G Q S^T + M D,   S' = e^(G_C) S + D^T (e^(G_C - G) K)
//
// S is never transposed: the state's 64 rows are the left operand, in registers, of S K^T and S Q^T; their accumulators,
// packed to tokens, are the left operand of the next product (inter_chunk_sm80.cuh). TMA loads the tiles, with its
// swizzle, up to STAGES - 1 chunks ahead. Products overlap with the packing of other products' results, in this order of steps:
//
//   one consumer on an SM, 248 registers:
//   tensor core   8. S K^T, S Q^T (4 of 8)  | 10. R (T - I)^T, 8. S Q^T (4)  | 11. D^T K   | 12. D M^T
//   meanwhile     O stored, 9. R            | 11. S decayed, D packed        | O decayed   | S packed
//   registers     S 64, S_tokens 32, SK 32, | S 64, S_tokens 32, O 32,       | S 64, O 32, | S 64, S_tokens 32,
//                 O 32, D 32, R 16: 208     | D 32, R 16, D packed: 176, 192 | D_tokens 32 | O 32, D_tokens 16
//
//   two (LEAN), 208 registers: all of S Q^T comes before 9, and S_tokens ends there. So 9 takes S 64, SK 32, O 32, D 32, R 16: 176
//
// Accumulators are in float, operands two to a register (_tokens, R). The rest of a thread's registers has gates, V and addresses. If they
// are too few, ptxas waits for each product (C7512). With two consumers the other one's products fill the tensor core during 9.
//
// The producer, one thread of another warpgroup, loads the tiles by TMA. The consumers write their outputs over V, and two
// warps of the producer's warpgroup store them, in whole rows (the epilogue). When the consumers did both, it took 500 of a
// chunk's 2400 cycles. If products under way write overlapping parts of one accumulator, ptxas waits for each of them: so the
// triangle of T is multiplied in two halves with separate accumulators, and M with its zeros above the diagonal.
//
// T and the gates come from the intra-chunk kernel; M = mask(Q K^T) is computed here, by one more warpgroup (the maker), from the
// consumers' tiles of K and Q: so the intra-chunk kernel does not read Q and writes half as much. The maker needs a third of a
// chunk's time.
//
// A CTA with one consumer warpgroup has one work tile, one with two has several: see WorkTile. Many sequences that are not split
// use inter_chunk_sm90_tiles.cuh.
//
// Steps, as in docs/kernels/prefill-chunk.md: 6 load (producer), 7 M (its maker), 8 S K^T and S Q^T, 9 R, 10 D, 11 S', 12 O
// (consumers), 13 store (epilogue).
#pragma once

#include "gates.cuh"
#include "context_parallel.cuh"
#include "row_products.cuh"
#include "wgmma_tokens.cuh"

namespace gdn {

constexpr int GROUP_ROWS = 64, V_TILE = CHUNK * GROUP_ROWS * 2;

struct Maps {
  CUtensorMap q, k, v;  // boxes: see tma_load_box
  CUtensorMap state;    // tma_load_state
};

template <int GROUPS>
struct GroupStage {
  char k[QK_TILE], q[QK_TILE];  // two halves of 64 columns each
  char v[GROUPS][V_TILE];     // replaced by the outputs after V has been read
  Prepared prepared;
};
// A stage of the pipeline holds a chunk; in inter_chunk_sm90_tiles.cuh it can also hold the state before a work tile: four blocks
// of 32 columns, see tma_load_state.
template <int GROUPS_, int STAGES_>
struct GroupShared {
  static constexpr int GROUPS = GROUPS_, STAGES = STAGES_;
  static constexpr bool LOOPS = GROUPS > 1;  // a CTA has several tiles
  static constexpr int WARPS = GROUPS * 4;   // of consumers
  static constexpr int UNIT_ROWS = GROUP_ROWS, TILES = 2 / GROUPS;  // TileSegment; tiles of a sequence and value head
  static constexpr int PIECES = 8;           // of 16 bytes, of a token's outputs in v[0]
  static constexpr bool PLANNED = false;     // whether all threads have waited for the kernel before, whose plan they read
  static constexpr bool MAKES_M = true;      // else M comes with T (inter_chunk_tma.cuh)
  static constexpr bool PACED = GROUPS == 1;  // whether the maker waits for `packing`; with two groups it gains 0.2 % (ladder)
  static constexpr int PREPARED = MATRIX;    // bytes that come from the intra-chunk kernel
  GroupStage<GROUPS> stages[STAGES];
  uint64_t full[STAGES], outputs_ready[STAGES], empty[STAGES];  // a stage's tiles have arrived; its outputs are written; it is free
  uint64_t m_ready[STAGES];                               // M is ready, or the maker does not need this state's stage
  uint64_t packing[STAGES];  // the consumers have S' of this stage's chunk and pack it: a good time for the next chunk's Q K^T
};
constexpr int state_block(int rows) { return rows * 128; }  // bytes
// A box of states [K, V] is [blocks][128 rows of K][128 bytes of V], with a block at least; where its element (k, v) is, and its bytes.
constexpr int K_FIRST_BLOCK = HEAD_DIM * 128;
__host__ __device__ constexpr int in_k_first(int k, int v, bool half) {
  const int columns = half ? 64 : 32, inside = v % columns * (half ? 2 : 4);
  return v / columns * K_FIRST_BLOCK + in_matrix(k, inside / 16) + inside % 16;
}
__host__ __device__ constexpr int k_first_box(int rows, bool half) {
  return (half ? (rows + 63) / 64 : rows / 32) * K_FIRST_BLOCK;
}
template <typename Shared> constexpr int STATE_BLOCK = state_block(HEAD_DIM / Shared::TILES);
static_assert(HEAD_DIM / 2 * 128 * 4 <= sizeof(GroupStage<1>) && HEAD_DIM * 128 * 4 <= sizeof(GroupStage<2>));
template <int GROUPS, int STAGES>
__host__ __device__ constexpr int group_shared() { return sizeof(GroupShared<GROUPS, STAGES>); }

#if FLASHCORE_COPY_ENGINE

// The next stage, and the parity of its barriers' phase, `i` after those that are done. Every role waits
// for each stage's `full` before the stage can be freed, because parity only distinguishes a phase from the next one. `made` is
// the same count for the barriers `m_ready`: with a single counter, ptxas would keep values in local memory.
template <int STAGES>
struct PipelineState {
  int begun = 0, made = 0;
  __device__ __forceinline__ int stage(int i = 0) const { return (begun + i) % STAGES; }
  __device__ __forceinline__ uint32_t parity(int i = 0) const { return (begun + i) / STAGES & 1; }
  __device__ __forceinline__ uint32_t m_ready_at(uint64_t (&barriers)[STAGES], int i) const {
    return shared_address(&barriers[(made + i) % STAGES]);
  }
  __device__ __forceinline__ void wait_for_m(uint64_t (&barriers)[STAGES], int i) const {
    mbarrier_wait(m_ready_at(barriers, i), (made + i) / STAGES & 1);
  }
  // The same with values that are uniform in the warp; and an advance by `count` chunks.
  template <bool LOOPS>
  __device__ __forceinline__ PipelineState take(int count) {
    const PipelineState now = LOOPS ? PipelineState{__shfl_sync(0xffffffffu, begun, 0), __shfl_sync(0xffffffffu, made, 0)} : *this;
    begun += count, made += count;
    return now;
  }
};

__device__ __forceinline__ void wait_for(const uint64_t& barrier, uint32_t parity) { mbarrier_wait(shared_address(&barrier), parity); }
// A warp's arrival, after all of its lanes' accesses.
__device__ __forceinline__ void warp_arrives(const uint64_t& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVALS) mbarrier_arrive(shared_address(&barrier));
}

// So many of a CTA's first chunks are loaded one after the other: all CTAs begin at once, and what is needed first would arrive
// together with the rest.
constexpr int IN_TURN = 3;

// The producer: one thread loads all chunks' tiles; before the last of them, `last`.
struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};
template <bool OUTPUTS, typename Shared, typename Last = Nothing>
__device__ __forceinline__ void produce(const Prefill& p, const Maps& maps, Shared& s, PipelineState<Shared::STAGES>& pipe,
                                    const Segment& at, int half, bool values, const Last& last = {}) {
  constexpr int GROUPS = Shared::GROUPS;
  const uint32_t bytes = QK_TILE + (OUTPUTS ? QK_TILE : 0) + (values ? GROUPS * V_TILE : 0) + Shared::PREPARED;
  const char* prepared = p.prepared + (static_cast<int64_t>(at.number) * p.HV + at.hv) * Shared::PREPARED;
  int token = at.first;
#pragma unroll 1
  for (int chunk = 0; chunk < at.count; ++chunk, token += CHUNK, prepared += int64_t{p.HV} * Shared::PREPARED) {
    auto& stage = s.stages[pipe.stage(chunk)];
    const uint32_t full = shared_address(&s.full[pipe.stage(chunk)]);
    // 6. Load
    if (chunk == at.count - 1) last();
    if (pipe.begun == 0 && chunk > 0 && chunk < IN_TURN) mbarrier_wait(shared_address(&s.full[pipe.stage(chunk - 1)]), 0);
    mbarrier_wait(shared_address(&s.empty[pipe.stage(chunk)]), pipe.parity(chunk) ^ 1);  // a new barrier counts as if a phase had ended
    mbarrier_arrive_expect_tx(full, bytes);
    tma_load_box(shared_address(stage.k), maps.k, token, 0, at.h, full);
    if (values) tma_load_box(shared_address(stage.v), maps.v, token, half, at.hv, full);
    if constexpr (!Shared::PLANNED) {  // of what is loaded only T and the gates come from the kernel before
      if (pipe.begun == 0 && chunk == 0) wait_for_kernel_before();
    }
    bulk_load(shared_address(stage.prepared.T), prepared, Shared::PREPARED, full);
    if constexpr (OUTPUTS) tma_load_box(shared_address(stage.q), maps.q, token, 0, at.h, full);
  }
  pipe.begun += at.count;
}

// Where a chunk's tiles are, of one consumer warpgroup.
struct ChunkTiles {
  char *k, *q, *v;  // v: 64 tokens x 64 rows of V
  const char* T;    // and the gates
  uint32_t M;       // an address
};
// The chunks of a segment in the stages of GroupShared, for those who compute and store outputs: see consume and store_outputs.
template <bool OUTPUTS, typename Shared>
struct StagedChunks {
  static constexpr bool ALL_AT_ONCE = true;
  Shared& s;
  PipelineState<Shared::STAGES> pipe;
  int group;  // consumer warpgroup
  __device__ __forceinline__ ChunkTiles tiles(int chunk) const {
    auto& stage = s.stages[pipe.stage(chunk)];
    return {stage.k, stage.q, stage.v[group], stage.prepared.T, shared_address(stage.prepared.T) + MATRIX};
  }
  __device__ __forceinline__ void wait_for_keys(int chunk) const { wait_for(s.full[pipe.stage(chunk)], pipe.parity(chunk)); }
  __device__ __forceinline__ void wait_for_values(int) const {}
  __device__ __forceinline__ void wait_for_t(int) const {}
  __device__ __forceinline__ void wait_for_m(int chunk) const { pipe.wait_for_m(s.m_ready, chunk); }
  // No __syncwarp: the wait for the last products has just brought the warp together.
  __device__ __forceinline__ void state_complete(int chunk) const {
    const bool arrives = threadIdx.x % 32 < ARRIVALS;
    if (!OUTPUTS && arrives) mbarrier_arrive(shared_address(&s.empty[pipe.stage(chunk)]));
    if (OUTPUTS && Shared::PACED && arrives) mbarrier_arrive(shared_address(&s.packing[pipe.stage(chunk)]));
  }
  __device__ __forceinline__ void outputs_written(int chunk) const { warp_arrives(s.outputs_ready[pipe.stage(chunk)]); }
  __device__ __forceinline__ void sync() const { named_barrier_sync<128>(group + 1); }
  __device__ __forceinline__ void wait_for_outputs(int chunk) const {
    wait_for(s.outputs_ready[pipe.stage(chunk)], pipe.parity(chunk));
  }
  __device__ __forceinline__ void free(int chunk) const { warp_arrives(s.empty[pipe.stage(chunk)]); }
};
// For a warp of a consumer; the pipeline goes on behind them.
template <bool OUTPUTS, typename Shared>
__device__ __forceinline__ StagedChunks<OUTPUTS, Shared> staged_chunks(Shared& s, PipelineState<Shared::STAGES>& pipe, const Segment& at) {
  return {s, pipe.template take<Shared::LOOPS>(at.count), Shared::GROUPS > 1 ? static_cast<int>(threadIdx.x / 128) : 0};
}

// The epilogue: warps that store the outputs of all chunks, which have replaced V. PIECES lanes per token, so that rows are whole.
// `chunks`: wait_for_outputs; tiles, the v of other consumers behind this one; free, when a warp is done with a stage.
constexpr int STORE_WARPS = 2;  // warps
template <int GROUPS, int PIECES, typename Chunks>
__device__ __forceinline__ void store_outputs(const Prefill& p, const Chunks& chunks, const Segment& at, int half, int thread,
                                              int first_piece = 0) {
  constexpr int ROWS = STORE_WARPS * 32 / PIECES;
  const int first = thread / PIECES, piece = first_piece + thread % PIECES;
  const uint32_t own = in_matrix(first, piece);  // 8 rows further are 1024 bytes further: ROWS is a multiple of 8
  const int64_t row = static_cast<int64_t>(p.HV) * HEAD_DIM;
  Token* to = p.output + (at.first + first) * row + at.hv * HEAD_DIM + half * GROUP_ROWS + piece * 8;
  int left = at.tokens - first;
#pragma unroll 1
  for (int chunk = 0; chunk < at.count; ++chunk, left -= CHUNK) {
    // 13. Store
    chunks.wait_for_outputs(chunk);
    const char* const v = chunks.tiles(chunk).v;
#pragma unroll 1
    for (int i = 0; i < CHUNK; i += ROWS) {
#pragma unroll
      for (int group = 0; group < GROUPS; ++group)
        if (i < left)
          store16(to + group * GROUP_ROWS,
                  at.padding() ? uint4{} : *reinterpret_cast<const uint4*>(v + group * V_TILE + own + i * 128));
      to += ROWS * row;
    }
    fence_proxy_async();  // TMA will overwrite it
    chunks.free(chunk);
  }
}
template <typename Shared>
__device__ __forceinline__ void store_staged_outputs(const Prefill& p, Shared& s, PipelineState<Shared::STAGES>& pipe,
                                                     const Segment& at, int half, int thread, int first_piece = 0) {
  store_outputs<Shared::GROUPS, Shared::PIECES>(p, StagedChunks<true, Shared>{s, pipe, 0}, at, half, thread, first_piece);
  pipe.begun += at.count;
}

#if FLASHCORE_WGMMA

// d += X M^T, for all of M; X as left operands of 16 tokens each.
__device__ __forceinline__ void square_times(float (&d)[8][4], const uint32_t (&X)[4][4], uint32_t M) {
  const KMajor m(M);
#pragma unroll
  for (int u = 0; u < 4; ++u) product(d, X[u], advance(m, u * 32), 1);
}
// d += X T^T, T as it is stored; tokens 0 to 31 and 32 to 63. Its upper right quarter is never read: the gates lie there.
__device__ __forceinline__ void triangle_times(float (&d)[2][4][4], const uint32_t (&X)[4][4], uint32_t T) {
  const KMajor b(T);
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    if (u < 2) product(d[0], X[u], advance(b, u * 32), 1);
    product(d[1], X[u], advance(b, 4096 + u * 32), 1);
  }
}

#endif  // FLASHCORE_WGMMA

// Gate `which` of token 8 i + 2t and of the next one.
__device__ __forceinline__ float2 gates_of(const char* prepared, int which, int i, int t) {
  return *reinterpret_cast<const float2*>(prepared + gate_at(which, 8 * i + 2 * t));
}

// e^(G_C): the decay of the state along a whole chunk.
__device__ __forceinline__ float decay_of_chunk(const char* prepared) { return gates_of(prepared, IN, CHUNK / 8 - 1, 3).y; }

// Zeros in the rows of a tile from `count` on, by THREADS threads.
template <int THREADS = 128>
__device__ __forceinline__ void clear_rows(char* tile, int count, int thread) {
#pragma unroll 1
  for (int i = thread; i < CHUNK * 8; i += THREADS)
    if (i / 8 >= count) reinterpret_cast<uint4*>(tile)[i] = {0, 0, 0, 0};
}

#if FLASHCORE_WGMMA

// Step 8: products FIRST to LAST - 1 of the eight of d = S X^T, X the tile of K or Q; a batch of its own.
template <int FIRST, int LAST>
__device__ __forceinline__ void begin_state_times(float (&d)[8][4], const uint32_t (&S)[8][4], const KMajor& X) {
#pragma unroll
  for (int step = FIRST; step < LAST; ++step)
    product(d, S[step], advance(X, step / 4 * (QK_TILE / 2) + step % 4 * 32), step > 0);
  warpgroup_commit();
}
// Steps 11 and 12: S, decayed; S as left operands; O, decayed.
__device__ __forceinline__ void decay_state(float (&S)[16][4], float by) {
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) S[j][c] *= by;
}
__device__ __forceinline__ void pack_state(uint32_t (&to)[8][4], const float (&S)[16][4]) {
#pragma unroll
  for (int step = 0; step < 8; ++step) as_left(to[step], S[2 * step], S[2 * step + 1]);
}
__device__ __forceinline__ void decay_outputs(float (&o)[8][4], const char* prepared, float scale, int t) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 in = gates_of(prepared, IN_Q, i, t);
#pragma unroll
    for (int c = 0; c < 4; ++c) o[i][c] *= scale * (c % 2 ? in.y : in.x);
  }
}

// Steps 8 to 12 of a segment's chunks, by a consumer warpgroup, in every kernel with wgmma. `chunks` says where the tiles are, and:
//
//   wait_for_keys, wait_for_values, wait_for_t, wait_for_m   until K; Q and V; T and the gates; M have arrived
//   ALL_AT_ONCE       K, Q, V, T and the gates arrive together. One consumer then loads V and the gates before it begins S Q^T,
//                     else it begins S Q^T while it waits for T
//   state_complete    S' is there: K, T and the gates are not read any more
//   outputs_written   O is in V's place
//   sync              a barrier of the warpgroup
//
// LEAN: two consumers on an SM, see above. `row`: the warp's first of the state's, for CHECKPOINTS alone.
template <bool OUTPUTS, bool LEAN, bool CHECKPOINTS = false, bool K_FIRST = false, typename Chunks>
__device__ __forceinline__ void consume(float (&S)[16][4], const Prefill& p, const Chunks& chunks, const Segment& at, bool values,
                                        int row = 0) {
  constexpr int EARLY = LEAN ? 8 : 4;                 // of the eight products of S Q^T come before R
  constexpr int LATER = OUTPUTS && !LEAN ? 1 : 0;     // batches of products that R and D need not wait for
  constexpr bool LOADS_FIRST = Chunks::ALL_AT_ONCE && !LEAN;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, t = lane % 4;
  // a lane's address for 16 tokens and the warp's 16 columns of V, in TMA's layout
  const uint32_t v_at = in_matrix(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
  const int count = __shfl_sync(0xffffffffu, at.count, 0);  // uniform: in a divergent loop ptxas would wait for each product
  uint32_t O_tokens[4][4] = {};  // of the previous chunk, of 16 tokens each
  const auto write_outputs = [&](int chunk) {
    const uint32_t v = shared_address(chunks.tiles(chunk).v);
#pragma unroll
    for (int j = 0; j < 4; ++j) store_transposed(v + v_at + j * 2048, O_tokens[j]);
    chunks.outputs_written(chunk);
  };

  uint32_t S_tokens[8][4];  // before a chunk, as left operands
  pack_state(S_tokens, S);

#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    const ChunkTiles tiles = chunks.tiles(chunk);
    const char* const prepared = tiles.T;
    const uint32_t v_tile = shared_address(tiles.v);
    const KMajor keys(shared_address(tiles.k)), queries(shared_address(tiles.q));
    const MNMajor<QK_TILE / 2> keys_mn(shared_address(tiles.k));
    chunks.wait_for_keys(chunk);
    const int left = at.tokens - chunk * CHUNK;
    if (left < CHUNK) {  // rows past the sequence's end: zeros in K and V, because 0 x NaN is not 0. Those of Q reach no output
      chunks.wait_for_values(chunk), chunks.wait_for_t(chunk);  // who makes T clears K, too, but not a peer's
      clear_rows(tiles.k, left, thread), clear_rows(tiles.k + QK_TILE / 2, left, thread);
      clear_rows(tiles.v, left, thread);
      fence_proxy_async();
      chunks.sync();
    }

    // 8. S K^T, S Q^T
    float SK[8][4], O[8][4];  // O: S Q^T at first. 64 rows of V x 64 tokens, eight tokens after the other
    float D[2][4][4];         // R at first; 2 x 32 tokens. With the registers of SK, ptxas would wait for each product
    warpgroup_arrive();
    begin_state_times<0, 8>(SK, S_tokens, keys);
    const auto begin_outputs = [&] {
      chunks.wait_for_values(chunk);
      warpgroup_arrive();
      begin_state_times<0, EARLY>(O, S_tokens, queries);
    };
    // 12 of the previous chunk: O to its stage
    if constexpr (OUTPUTS) {
      if (chunk > 0) write_outputs(chunk - 1);
      if constexpr (!LOADS_FIRST) begin_outputs();
    }
    chunks.wait_for_t(chunk);
    uint32_t V[4][4] = {};
    float2 decay[8];
    const auto load = [&](int j) {  // of 16 tokens
      if (OUTPUTS || values) load_transposed(V[j], v_tile + v_at + j * 2048);
      decay[2 * j] = gates_of(prepared, IN_K, 2 * j, t), decay[2 * j + 1] = gates_of(prepared, IN_K, 2 * j + 1, t);
    };
    const auto value = [&](int i, int c) {
      const uint32_t word = V[i / 2][i % 2 * 2 + c / 2];
      return token_of<Token>(word, c % 2);
    };
#pragma unroll
    for (int j = 0; j < 4 && !LEAN; ++j) load(j);
    float weighed[8][4];  // beta V: without outputs there are registers for it, and R is a single addition after the wait
    float2 to_end[8];
    if constexpr (!OUTPUTS) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 beta = gates_of(prepared, BETA, i, t);
        decay[i] = {beta.x * decay[i].x, beta.y * decay[i].y};
#pragma unroll
        for (int c = 0; c < 4; ++c) weighed[i][c] = (c % 2 ? beta.y : beta.x) * value(i, c);
      }
    }
    if constexpr (OUTPUTS && LOADS_FIRST) begin_outputs();

    // 9. R
    warpgroup_wait<LATER>();
    warpgroup_fence_operand(SK);
    float kept;  // with two consumers only after R: a register less
    if constexpr (!LEAN) kept = decay_of_chunk(prepared);
    uint32_t R[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (LEAN) load(j);
#pragma unroll
      for (int i = 2 * j; i < 2 * j + 2; ++i) {
        float2 beta;
        if constexpr (OUTPUTS) beta = gates_of(prepared, BETA, i, t);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float by = -(c % 2 ? decay[i].y : decay[i].x);
          float& r = D[j / 2][i % 4][c];
          if constexpr (OUTPUTS) r = (c % 2 ? beta.y : beta.x) * fmaf(by, SK[i][c], value(i, c));
          else r = fmaf(by, SK[i][c], weighed[i][c]);
        }
      }
      as_left(R[j], D[j / 2][2 * (j % 2)], D[j / 2][2 * (j % 2) + 1]);
    }

    // 10. D = R + (T - I) R
    warpgroup_arrive();
    triangle_times(D, R, shared_address(prepared));
    warpgroup_commit();
    if constexpr (OUTPUTS && EARLY < 8) begin_state_times<EARLY, 8>(O, S_tokens, queries);
    // 11. S' = e^(G_C) S + D^T K: the decay, under 10
    if constexpr (LEAN) kept = decay_of_chunk(prepared);
    decay_state(S, kept);
#pragma unroll
    for (int i = 0; i < 8 && !OUTPUTS; ++i) to_end[i] = gates_of(prepared, OUT, i, t);
    warpgroup_wait<LATER>();
    warpgroup_fence_operand(D[0]), warpgroup_fence_operand(D[1]);
    uint32_t plain[4][4], decayed[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float later[2][4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 2 * j + e;
        if constexpr (OUTPUTS) to_end[i] = gates_of(prepared, OUT, i, t);
#pragma unroll
        for (int c = 0; c < 4; ++c) later[e][c] = D[j / 2][2 * (j % 2) + e][c] * (c % 2 ? to_end[i].y : to_end[i].x);
      }
      as_left(decayed[j], later[0], later[1]);
    }
    // 11. The product
    warpgroup_arrive();
#pragma unroll
    for (int u = 0; u < 4; ++u) product_mn(S, decayed[u], advance(keys_mn, u * 2048), 1);
    warpgroup_commit();
    // 12. O = scale e^G Q S^T + M D
    if constexpr (OUTPUTS) {
#pragma unroll
      for (int j = 0; j < 4; ++j) as_left(plain[j], D[j / 2][2 * (j % 2)], D[j / 2][2 * (j % 2) + 1]);
      warpgroup_wait<1>();
      warpgroup_fence_operand(O);
      if (POOL) chunks.wait_for_m(chunk);  // the maker has IN_Q
      decay_outputs(O, prepared, p.scale, t);
      if (!POOL) chunks.wait_for_m(chunk);
      warpgroup_arrive();
      square_times(O, plain, tiles.M);
      warpgroup_commit();
    }
    // 11. S packed for the next chunk, under 12's product
    warpgroup_wait<OUTPUTS ? 1 : 0>();
    warpgroup_fence_operand(S);
    chunks.state_complete(chunk);
    pack_state(S_tokens, S);
    if constexpr (CHECKPOINTS) {
      if (at.keeps(chunk)) store_state<K_FIRST>(at.kept(chunk), S, row, 0, lane);
    }
    if constexpr (OUTPUTS) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(O);
#pragma unroll
      for (int j = 0; j < 4; ++j) as_left(O_tokens[j], O[2 * j], O[2 * j + 1]);
    }
  }
  if constexpr (OUTPUTS) {
    if (count > 0) write_outputs(count - 1);
  }
}

#endif  // FLASHCORE_WGMMA

template <bool OUTPUTS, typename Shared>
__device__ __forceinline__ void group_begin(Shared& s) {
  constexpr int CONSUMER_ARRIVALS = Shared::WARPS * ARRIVALS, MAKER_ARRIVALS = 4 * ARRIVALS;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < Shared::STAGES; ++i) {
      mbarrier_init(shared_address(&s.full[i]), 1), mbarrier_init(shared_address(&s.outputs_ready[i]), CONSUMER_ARRIVALS);
      mbarrier_init(shared_address(&s.empty[i]), OUTPUTS ? STORE_WARPS * ARRIVALS : CONSUMER_ARRIVALS);
      mbarrier_init(shared_address(&s.m_ready[i]), MAKER_ARRIVALS), mbarrier_init(shared_address(&s.packing[i]), CONSUMER_ARRIVALS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
}

// A state's accumulators from a stage of the pipeline, in blocks of BLOCK bytes as tma_load_state brings them; rows `row` and `row` + 8.
template <int BLOCK, bool K_FIRST = false>
__device__ __forceinline__ void read_state(float (&S)[16][4], const Prefill& p, const char* tile, StateOf state, int row, int lane) {
  if (POOL && state < 0) {
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[j][c] = 0.f;
  } else if constexpr (K_FIRST) {
    const bool bf16 = p.state_blocks() == 2;
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = in_k_first(8 * j + lane % 4 * 2 + c % 2, row + c / 2 * 8, bf16);
        S[j][c] = bf16 ? __uint_as_float(uint32_t{*reinterpret_cast<const uint16_t*>(tile + at)} << 16)
                       : *reinterpret_cast<const float*>(tile + at);
      }
  } else if (POOL && p.state_blocks() == 2) {  // bf16, two blocks of 64 columns
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = j / 8 * BLOCK + in_matrix(row + half * 8, j % 8) + lane % 4 * 4;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(tile + at);
        S[j][2 * half] = __uint_as_float(word << 16), S[j][2 * half + 1] = __uint_as_float(word & 0xffff0000u);
      }
  } else
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = j / 4 * BLOCK + in_matrix(row + half * 8, j % 4 * 2 + lane % 4 / 2) + lane % 2 * 8;
      const float2 pair = *reinterpret_cast<const float2*>(tile + at);
      S[j][2 * half] = pair.x, S[j][2 * half + 1] = pair.y;
    }
}

#if FLASHCORE_WGMMA

// Step 7 from the accumulators of Q K^T: weighted, masked, and to `to`. before_of(j, t): G of columns 8 j + 2 t and the next, with POOL
// plus log2 |k|.
template <typename Before>
__device__ __forceinline__ void store_m(float (&d)[8][4], const float (&by)[2], const float (&G)[2], int warp, int lane, uint32_t to,
                                        const Before& before_of) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t words[4] = {};
    if (j <= warp) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 before = before_of(2 * j + e, t);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int row = warp * 16 + g + c / 2 * 8, column = j * 16 + e * 8 + 2 * t + c % 2;
          const float value = by[c / 2] * exp2_approx(G[c / 2] - (c % 2 ? before.y : before.x)) * d[2 * j + e][c];
          d[2 * j + e][c] = column <= row ? value : 0.f;
        }
      }
      as_left(words, d[2 * j], d[2 * j + 1]);
    }
    store_matrices(to ^ (2 * j + lane / 16) << 4, words);
  }
}

// The maker: computes M of all chunks of a work tile, from K and Q in the stages, as the consumers end the chunk before (PACED), or
// up to STAGES - 1 chunks ahead of them. A warp has 16 rows. Rows of K and Q that belong to another sequence have no effect: columns
// after the diagonal are zeros, and rows past the end give outputs that are not stored.
template <typename Shared>
__device__ __forceinline__ void make_m(const Prefill& p, Shared& s, PipelineState<Shared::STAGES>& pipe, const Segment& at) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0), first_lane = threadIdx.x % 32;
  const int count = __shfl_sync(0xffffffffu, at.count, 0);
  const auto own = pipe.template take<Shared::LOOPS>(count);
#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    // again, where the norms take registers and there are few
    const int lane = POOL && Shared::GROUPS > 1 ? static_cast<int>(thread_again() % 32) : first_lane, g = lane / 4, t = lane % 4;
    auto& stage = s.stages[own.stage(chunk)];
    // 7. M
    const KMajor queries(shared_address(stage.q)), keys(shared_address(stage.k));
    mbarrier_wait(shared_address(&s.full[own.stage(chunk)]), own.parity(chunk));
    float by[2] = {p.scale, p.scale};
    if constexpr (POOL) {  // |q|^2, the diagonal of Q Q^T
      char* const prepared = reinterpret_cast<char*>(&stage.prepared);
      const uint32_t own = shared_address(stage.q) + warp * 16 * 128;
      const uint32_t left_at = own + in_matrix(lane % 16, lane / 16), right_at = own + in_matrix(lane / 16 * 8 + lane % 8, lane / 8 % 2);
      float squares[2][4] = {}, norm[2];
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        uint32_t left[4], right[4];
        load_matrices(left, (left_at ^ step % 4 << 5) + step / 4 * (QK_TILE / 2));
        load_matrices(right, (right_at ^ step % 4 << 5) + step / 4 * (QK_TILE / 2));
        multiply_tokens<Token>(squares[0], left, right[0], right[1]), multiply_tokens<Token>(squares[1], left, right[2], right[3]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // rows g and g + 8, from the lane that has them
        norm[h] = p.inverse_norm(__shfl_sync(0xffffffffu, g % 2 ? squares[h][2 * h + 1] : squares[h][2 * h], 4 * g + g / 2));
        by[h] *= norm[h];
      }
      const int row = warp * 16 + g + 8 * t;
      if (t < 2)
        *reinterpret_cast<float*>(prepared + gate_at(IN_Q, row)) =
            (t ? norm[1] : norm[0]) * *reinterpret_cast<const float*>(prepared + gate_at(IN, row));
    }
    float d[8][4];
    // At any other time Q K^T would delay the consumers' products (ladder, "The maker's products in the consumers' pause").
    if (Shared::PACED && chunk > 0) mbarrier_wait(shared_address(&s.packing[own.stage(chunk - 1)]), own.parity(chunk - 1));
    begin_row_products(d, queries, keys);
    const char* const prepared = reinterpret_cast<const char*>(&stage.prepared);
    const float G[2] = {*reinterpret_cast<const float*>(prepared + gate_at(SUM, warp * 16 + g)),
                        *reinterpret_cast<const float*>(prepared + gate_at(SUM, warp * 16 + g + 8))};
    const uint32_t to = shared_address(stage.prepared.M) + in_matrix(warp * 16 + lane % 16, 0);
    warpgroup_wait<0>();
    warpgroup_fence_operand(d);
    store_m(d, by, G, warp, lane, to, [&](int j, int t) { return gates_of(prepared, POOL ? SUM_KEY : SUM, j, t); });
    fence_proxy_async();
    __syncwarp();
    if (lane < ARRIVALS) mbarrier_arrive(own.m_ready_at(s.m_ready, chunk));
  }
}

#endif  // FLASHCORE_WGMMA
#endif  // FLASHCORE_COPY_ENGINE

// GROUPS consumer warpgroups, the maker's if there are outputs, and the producer's with the epilogue. They redistribute their
// registers, in multiples of 8: if the sum is more than the launch has, the kernel hangs.
__host__ __device__ constexpr int group_threads(int groups, bool outputs) { return (groups + outputs + 1) * 128; }
__host__ __device__ constexpr int producer_registers(bool outputs) { return outputs ? 32 : 40; }
__host__ __device__ constexpr int maker_registers(int groups) { return groups > 1 ? 64 : 104; }
__host__ __device__ constexpr int consumer_registers(int groups, bool outputs) { return !outputs ? 232 : groups > 1 ? 208 : 248; }

// A CTA's work tile: 64 GROUPS rows of V of a value head and segment. With one warpgroup a CTA has one of them, grid (2, HV, numbers
// of segments); with two it has those from its own number on in steps of the grid.
template <int GROUPS>
struct WorkTile {
  int half, hv, slot;
  __device__ __forceinline__ WorkTile(const Prefill& p, int number) {
    if constexpr (GROUPS > 1) half = 0, slot = number / p.HV, hv = number - slot * p.HV;
    else half = blockIdx.x, hv = blockIdx.y, slot = blockIdx.z;
  }
  __device__ __forceinline__ Segment segment(const Prefill& p) const {
    if constexpr (GROUPS > 1) return {p, hv, slot};  // CTAs without work do not matter here, and this takes fewer registers
    else return segment_of(p, hv, slot, 0);
  }
  // In the matrix of all states' rows.
  __device__ __forceinline__ int row(const Prefill& p) const { return (slot * p.HV + hv) * HEAD_DIM + half * GROUP_ROWS; }
};
// Runs `code` for each tile of this CTA, with whether it is the first: a static schedule.
template <int GROUPS, typename Code>
__device__ __forceinline__ void for_each_static_tile(const Prefill& p, int tiles, const Code& code) {
  if constexpr (GROUPS > 1) {
#pragma unroll 1
    for (int number = blockIdx.x; number < tiles; number += gridDim.x)
      code(WorkTile<GROUPS>(p, number), number == static_cast<int>(blockIdx.x));
  } else {
    code(WorkTile<GROUPS>(p, 0), true);
  }
}

template <int GROUPS, int STAGES, bool CHECKPOINTS = false, bool K_FIRST = false>
__global__ void __launch_bounds__(group_threads(GROUPS, true), 1)
gdn_prefill_inter_chunk_sm90(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps, const int tiles) {
#if FLASHCORE_WGMMA
  constexpr int MAKER = GROUPS * 4, PRODUCER = MAKER + 4;  // their first warps
  auto& s = *reinterpret_cast<GroupShared<GROUPS, STAGES>*>(tile_memory());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float S[16][4];
  if (!p.segment && warp < MAKER) {  // before everything that needs cu_seqlens
    const WorkTile<GROUPS> of(p, blockIdx.x);
    if constexpr (POOL) {
      load_state<K_FIRST>(S, p.original(p.state_of(of.slot), of.hv), of.half * GROUP_ROWS + warp * 16, 0, lane);
      warpgroup_fence_operand(S);  // else the compiler takes conversions from bf16 into the loop over chunks, and spills
    } else {
      load_state(S, p.rows(of.row(p) + warp * 16), 0, 0, lane);
    }
  }
  if (warp == PRODUCER && elect_one()) prefetch_tensor_map(maps.k), prefetch_tensor_map(maps.v), prefetch_tensor_map(maps.q);
  group_begin<true>(s);
  PipelineState<STAGES> pipe;
  if (warp >= PRODUCER) {
    warpgroup_reg_dealloc<producer_registers(true)>();
    const int other = warp - PRODUCER;
    const bool produces = other == 0 && elect_one();
    for_each_static_tile<GROUPS>(p, tiles, [&](const WorkTile<GROUPS>& of, bool) {
      const Segment at = of.segment(p);
      if (produces) produce<true>(p, maps, s, pipe, at, of.half, true);
      if (other > 0 && other <= STORE_WARPS) store_staged_outputs(p, s, pipe, at, of.half, threadIdx.x - (PRODUCER + 1) * 32);
    });
    return;
  }
  if (warp >= MAKER) {
    warpgroup_reg_dealloc<maker_registers(GROUPS)>();
    for_each_static_tile<GROUPS>(p, tiles,
                                 [&](const WorkTile<GROUPS>& of, bool) { make_m(p, s, pipe, of.segment(p)); });
    return;
  }
  warpgroup_reg_alloc<consumer_registers(GROUPS, true)>();
  if (p.segment) wait_for_kernel_before();  // for the segments' states
  for_each_static_tile<GROUPS>(p, tiles, [&](const WorkTile<GROUPS>& of, bool first) {
    const Segment at = of.segment(p);
    if (!at.there()) return;
    const int row = of.half * GROUP_ROWS + warp * 16;
    if (p.segment || !first) load_start<K_FIRST>(S, at, row, 0, lane);
    if constexpr (POOL) warpgroup_fence_operand(S);
    consume<true, (GROUPS > 1), CHECKPOINTS, K_FIRST>(S, p, staged_chunks<true>(s, pipe, at), at, true, row);
    if (!at.last) return;
    store_state<K_FIRST>(at.end(), S, row, 0, lane);
  });
#endif
}

}  // namespace gdn
