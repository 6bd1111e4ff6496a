// The launch of mtp.cuh's kernel with the constants that TUNED (tuned.h, or tuned_outputs.h for outputs alone, included before this
// file) has for this GPU and size.
#pragma once

#include <cstdint>
#include <utility>

#include "mtp.cuh"
#include "tuned_row.cuh"

namespace gdn {

template <bool GIVEN, typename T, typename Token, bool K_FIRST, int TOKENS, bool WRITES, size_t I>
void launch_mtp_row(const MtpArguments& p, int64_t heads, cudaStream_t stream) {
  constexpr Tuned t = TUNED[I];
  // 8 tokens need more registers, so warps share rows; and they have more products, which 8 rows would leave half empty.
  // A row of K of a tile with 8 columns of 16 bits would be half a sector, so there are 16.
  constexpr int ROWS = TOKENS == 4 && !(K_FIRST && sizeof(T) == 2) ? t.rows : 16, SPLIT = TOKENS == 4 || t.split > 2 ? t.split : 2;
  constexpr int ALL_GROUPS = t.groups * t.rows > ROWS ? t.groups * t.rows / ROWS : 1;
  // Of outputs of 8 tokens and a float state small CTAs are the fastest.
  constexpr bool SMALL = !WRITES && TOKENS == 8 && sizeof(T) == 4 && SPLIT == 2 && ALL_GROUPS > 2 && !K_FIRST;
  constexpr int GROUPS = SMALL ? 2 : ALL_GROUPS;
  constexpr int RESIDENT = TOKENS == 8 ? 1 : K_FIRST && t.resident > 32 ? 32 : t.resident;  // K_FIRST keeps its words: 40 would spill
  constexpr auto kernel = gdn_mtp<T, TOKENS, WRITES, ROWS, SPLIT, GROUPS, t.load, t.store, RESIDENT, GIVEN, Token, K_FIRST>;
  kernel<<<static_cast<uint32_t>(heads * (V / (ROWS * GROUPS))), (SPLIT * GROUPS + 1) * 32, 0, stream>>>(p);
}

template <bool GIVEN, typename T, typename Token, bool K_FIRST, int TOKENS, bool WRITES, size_t... I>
void launch_mtp_row(size_t row, const MtpArguments& p, int64_t heads, cudaStream_t stream, std::index_sequence<I...>) {
  (void)((I == row && (launch_mtp_row<GIVEN, T, Token, K_FIRST, TOKENS, WRITES, I>(p, heads, stream), true)) || ...);
}

template <bool GIVEN, typename T, typename Token, bool K_FIRST, bool WRITES>
void launch_mtp(size_t row, const MtpArguments& p, int64_t heads, cudaStream_t stream) {
  constexpr auto rows = std::make_index_sequence<ROWS_TUNED>{};
  if (p.tokens <= 4) launch_mtp_row<GIVEN, T, Token, K_FIRST, 4, WRITES>(row, p, heads, stream, rows);
  else launch_mtp_row<GIVEN, T, Token, K_FIRST, 8, WRITES>(row, p, heads, stream, rows);
}

// heads: B * HV; each has CTAs of its own.
template <typename T, bool WRITES, typename Token = __nv_bfloat16, bool K_FIRST = false>
void launch_mtp(const MtpArguments& p, int64_t heads, int device, cudaStream_t stream) {
  const size_t row = chosen(TUNED, sms(device), heads);
  if (p.A_log) launch_mtp<false, T, Token, K_FIRST, WRITES>(row, p, heads, stream);
  else launch_mtp<true, T, Token, K_FIRST, WRITES>(row, p, heads, stream);
}

}  // namespace gdn
