// What the host takes lengths to be, which it does not know: num_tokens tokens are N sequences', and one of those is often much longer than
// the others. Of the contest's batches of 2 to 5 sequences with 1500 tokens and more, nearly all have seven eighths of them in
// one; of 13 sequences and more one has an eighth to five sixths.
#pragma once

#include <algorithm>
#include <cstdint>

#include "chunk.cuh"

namespace gdn {

// Tokens that the longest sequence may well have.
inline int64_t likely_longest(int64_t num_tokens, int64_t N) { return std::min(num_tokens, std::max(3 * num_tokens / N, num_tokens / 4)); }

// Whether cuda-recurrent's kernel is to have them, which is best up to `tokens` of a sequence. Where there are several for each SM
// it is their mean that counts: chunks of 64 tokens want at least three quarters of one.
inline bool use_recurrent(int64_t num_tokens, int64_t N, int64_t HV, int64_t tokens, int64_t sms) {
  const bool many = N * HV > 3 * sms;
  return likely_longest(num_tokens, N) <= tokens && (!many || num_tokens / N <= CHUNK * 3 / 4);
}

// Whether not every half of V, of all sequences and value heads, can have an SM. Then none is cut, and launch_sm90_tiles.cu has them.
inline bool more_than_one_wave(int64_t N, int64_t HV, int64_t sms) { return 2 * N * HV > sms; }

// Chunks of a segment, 0: none is cut. All tokens in as many parts as make `segments` with those of all value heads, and as if
// they were one sequence's. But none that is no longer than a mean of some length, where such sequences have a good part of the
// SMs to themselves. Not in two parts, for half a sequence moved and then current takes as long as the whole; nor parts so short,
// nor of so few chunks, that four launches and half as many products again cost more than they save. Memory is 8 KB a chunk,
// 16 by mma.sync, and 128 KB a segment.
constexpr int SHORTEST_SEGMENT = 8, SOME_LENGTH = 12, SHORTEST_CUT = 20;  // chunks
inline int segment_chunks(int64_t num_tokens, int64_t N, int64_t HV, int segments, int64_t sms) {
  const int64_t chunks = num_tokens / CHUNK, mean = chunks / N, parts = segments / HV;
  if (parts < 3 || chunks < SHORTEST_CUT || more_than_one_wave(N, HV, sms)) return 0;
  const int64_t whole = mean >= SOME_LENGTH && 5 * N * HV > sms ? mean : SHORTEST_SEGMENT;
  return static_cast<int>(std::max(whole, (chunks + parts - 1) / parts));
}

}  // namespace gdn
