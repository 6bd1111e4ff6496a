// The launch of mtp.cuh's kernel with the constants that TUNED (tuned.h, or tuned_outputs.h for outputs alone, included before this
// file) has for this GPU and size.
#pragma once

#include <cstdint>
#include <utility>

#include "mtp.cuh"
#include "tuned_row.cuh"

namespace gdn {

template <bool GIVEN, typename T, typename Token, int TOKENS, bool WRITES, size_t I>
void launch_mtp_row(const MtpArguments& p, int64_t heads, cudaStream_t stream) {
  constexpr Tuned t = TUNED[I];
  // 8 tokens need more registers, so warps share rows; and they have more products, which 8 rows would leave half empty.
  constexpr int ROWS = TOKENS == 4 ? t.rows : 16, SPLIT = TOKENS == 4 || t.split > 2 ? t.split : 2;
  constexpr int ALL_GROUPS = t.groups * t.rows > ROWS ? t.groups * t.rows / ROWS : 1;
  // Of outputs of 8 tokens and a float state small CTAs are the fastest.
  constexpr int GROUPS = !WRITES && TOKENS == 8 && sizeof(T) == 4 && SPLIT == 2 && ALL_GROUPS > 2 ? 2 : ALL_GROUPS;
  constexpr int RESIDENT = TOKENS == 4 ? t.resident : 1;
  constexpr auto kernel = gdn_mtp<T, TOKENS, WRITES, ROWS, SPLIT, GROUPS, t.load, t.store, RESIDENT, GIVEN, Token>;
  kernel<<<static_cast<uint32_t>(heads * (V / (ROWS * GROUPS))), (SPLIT * GROUPS + 1) * 32, 0, stream>>>(p);
}

template <bool GIVEN, typename T, typename Token, int TOKENS, bool WRITES, size_t... I>
void launch_mtp_row(size_t row, const MtpArguments& p, int64_t heads, cudaStream_t stream, std::index_sequence<I...>) {
  (void)((I == row && (launch_mtp_row<GIVEN, T, Token, TOKENS, WRITES, I>(p, heads, stream), true)) || ...);
}

template <bool GIVEN, typename T, typename Token, bool WRITES>
void launch_mtp(size_t row, const MtpArguments& p, int64_t heads, cudaStream_t stream) {
  constexpr auto rows = std::make_index_sequence<ROWS_TUNED>{};
  if (p.tokens <= 4) launch_mtp_row<GIVEN, T, Token, 4, WRITES>(row, p, heads, stream, rows);
  else launch_mtp_row<GIVEN, T, Token, 8, WRITES>(row, p, heads, stream, rows);
}

// heads: B * HV; each has CTAs of its own.
template <typename T, bool WRITES, typename Token = __nv_bfloat16>
void launch_mtp(const MtpArguments& p, int64_t heads, int device, cudaStream_t stream) {
  const size_t row = chosen(TUNED, sms(device), heads);
  if (p.A_log) launch_mtp<false, T, Token, WRITES>(row, p, heads, stream);
  else launch_mtp<true, T, Token, WRITES>(row, p, heads, stream);
}

}  // namespace gdn
