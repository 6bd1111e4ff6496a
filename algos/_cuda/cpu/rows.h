// A block of rows of the state at a time, one pass: read S, both dots, write S'. One version per instruction set,
// chosen at run time, because the builder passes no -march flag.
//
//   x = S k,  y = S q  (old S);  d = beta (v - g x);  o = scale (g y + d k.q);  S' = g S + d k^T
//
// The block (4 KiB) is read from memory for the dots and again from L1 for the update. The serial part, sums over lanes
// and then d, is done once for all its rows. Four rows share each load of k and q, and their sums over lanes are one small
// transposition. A state that is not in the cache is prefetched during the update, so that reads and writes overlap.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GDN_X86 1
#include <immintrin.h>
#endif

namespace gdn {

constexpr int K = 128, BLOCK = 8, STEP = 4, AHEAD = 32;  // in rows: see algo.toml

// Shared by the rows of one value head of one batch element.
struct Head {
  alignas(64) float k[K];
  alignas(64) float q[K];
  float kq, g, beta, scale;
};

inline float from_bf16(uint16_t x) {
  const uint32_t u = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline uint16_t to_bf16(float f) {  // to nearest, ties to even
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN: rounding its payload up could make it infinite
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// What v and o are of.
struct Bf16 {
  static float from(uint16_t x) { return from_bf16(x); }
  static uint16_t to(float x) { return to_bf16(x); }
};

// From the dots of four rows to their corrections d and outputs o.
template <typename Token>
inline void finish(const Head& h, const float* x, const float* y, const uint16_t* v, float* d, uint16_t* o) {
  for (int r = 0; r < STEP; ++r) {
    d[r] = h.beta * (Token::from(v[r]) - h.g * x[r]);
    o[r] = Token::to(h.scale * (h.g * y[r] + d[r] * h.kq));
  }
}

// s, n: [rows, K] f32, old and new state; v, o: [rows] bf16; rows is a multiple of BLOCK.
using Rows = void (*)(const Head& h, const float* s, const uint16_t* v, float* n, uint16_t* o, int rows);

typedef float f32x4 __attribute__((vector_size(16)));  // GCC's and Clang's own vectors: SSE2, NEON, VSX

inline f32x4 load4(const float* p) {
  f32x4 x;
  std::memcpy(&x, p, 16);
  return x;
}

template <typename Token>
void rows_portable(const Head& h, const float* s, const uint16_t* v, float* n, uint16_t* o, int rows) {
  for (int i = 0; i < rows; i += STEP, s += STEP * K, n += STEP * K) {
    float x[STEP], y[STEP], d[STEP];
    for (int r = 0; r < STEP; ++r) {
      const float* p = s + r * K;
      f32x4 x0{}, x1{}, y0{}, y1{};
      for (int c = 0; c < K; c += 8) {
        const f32x4 a0 = load4(p + c), a1 = load4(p + c + 4);
        x0 += a0 * load4(h.k + c), x1 += a1 * load4(h.k + c + 4);
        y0 += a0 * load4(h.q + c), y1 += a1 * load4(h.q + c + 4);
      }
      x0 += x1, y0 += y1;
      x[r] = (x0[0] + x0[1]) + (x0[2] + x0[3]);
      y[r] = (y0[0] + y0[1]) + (y0[2] + y0[3]);
    }
    finish<Token>(h, x, y, v + i, d, o + i);
    for (int r = 0; r < STEP; ++r) {
      for (int c = 0; c < K; c += 4) {
        const f32x4 b = h.g * load4(s + r * K + c) + d[r] * load4(h.k + c);
        std::memcpy(n + r * K + c, &b, 16);
      }
    }
  }
}

#ifdef GDN_X86
#define GDN_AVX2 __attribute__((target("avx2,fma")))
#define GDN_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx2,fma")))

inline void prefetch(const float* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// The sums over the lanes of a, b, c, d.
GDN_AVX2 inline __m128 sums(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}

// finish() in vectors: one lane per row.
GDN_AVX2 inline void finish4(const Head& h, __m128 x, __m128 y, const uint16_t* v, float* d, uint16_t* o) {
  const __m128i v_raw = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(v)));
  const __m128 v4 = _mm_castsi128_ps(_mm_slli_epi32(v_raw, 16)), g = _mm_set1_ps(h.g);
  const __m128 d4 = _mm_mul_ps(_mm_set1_ps(h.beta), _mm_fnmadd_ps(g, x, v4));
  const __m128 o4 = _mm_mul_ps(_mm_set1_ps(h.scale), _mm_fmadd_ps(g, y, _mm_mul_ps(d4, _mm_set1_ps(h.kq))));
  _mm_storeu_ps(d, d4);
  const __m128i u = _mm_castps_si128(o4);
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(u, 16), _mm_set1_epi32(1));
  const __m128i even = _mm_srli_epi32(_mm_add_epi32(_mm_add_epi32(u, _mm_set1_epi32(0x7fff)), odd), 16);
  const __m128i nan = _mm_castps_si128(_mm_cmpunord_ps(o4, o4));
  const __m128i bf16 = _mm_blendv_epi8(even, _mm_set1_epi32(0x7fc0), nan);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(o), _mm_packus_epi32(bf16, bf16));
}

template <bool STREAM>
GDN_AVX2 void rows_avx2(const Head& h, const float* s, const uint16_t* v, float* n, uint16_t* o, int rows) {
  const __m256 g = _mm256_set1_ps(h.g);
  for (int i = 0; i < rows; i += BLOCK, s += BLOCK * K, n += BLOCK * K) {
    float d[BLOCK];
    for (int r0 = 0; r0 < BLOCK; r0 += STEP) {
      const float* p = s + r0 * K;
      __m256 x[STEP], y[STEP];
#pragma GCC unroll 4
      for (int r = 0; r < STEP; ++r) x[r] = y[r] = _mm256_setzero_ps();
      for (int c = 0; c < K; c += 8) {
        const __m256 k = _mm256_load_ps(h.k + c), q = _mm256_load_ps(h.q + c);
#pragma GCC unroll 4
        for (int r = 0; r < STEP; ++r) {
          const __m256 a = _mm256_loadu_ps(p + r * K + c);
          x[r] = _mm256_fmadd_ps(a, k, x[r]);
          y[r] = _mm256_fmadd_ps(a, q, y[r]);
        }
      }
      finish4(h, sums(x[0], x[1], x[2], x[3]), sums(y[0], y[1], y[2], y[3]), v + i + r0, d + r0, o + i + r0);
    }
    for (int r = 0; r < BLOCK; ++r) {
      const float* p = s + r * K;
      const __m256 d8 = _mm256_set1_ps(d[r]);
#pragma GCC unroll 16
      for (int c = 0; c < K; c += 8) {
        if (STREAM && c % 16 == 0) prefetch(p + AHEAD * K + c);
        const __m256 a = _mm256_mul_ps(g, _mm256_loadu_ps(p + c));
        const __m256 b = _mm256_fmadd_ps(d8, _mm256_load_ps(h.k + c), a);
        if (STREAM) _mm256_stream_ps(n + r * K + c, b);
        else _mm256_storeu_ps(n + r * K + c, b);
      }
    }
  }
  if (STREAM) _mm_sfence();  // the release that publishes them does not order streaming stores
}

GDN_AVX512 inline __m256 fold(__m512 a) {
  return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}

GDN_AVX512 inline __m128 sums(const __m512* a) { return sums(fold(a[0]), fold(a[1]), fold(a[2]), fold(a[3])); }

template <bool STREAM>
GDN_AVX512 void rows_avx512(const Head& h, const float* s, const uint16_t* v, float* n, uint16_t* o, int rows) {
  constexpr int C = K / 16;
  __m512 k[C], q[C];  // 16 of the 32 registers
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) k[c] = _mm512_load_ps(h.k + c * 16), q[c] = _mm512_load_ps(h.q + c * 16);
  const __m512 g = _mm512_set1_ps(h.g);
  for (int i = 0; i < rows; i += BLOCK, s += BLOCK * K, n += BLOCK * K) {
    float d[BLOCK];
    for (int r0 = 0; r0 < BLOCK; r0 += STEP) {
      const float* p = s + r0 * K;
      __m512 x[STEP], y[STEP];
#pragma GCC unroll 4
      for (int r = 0; r < STEP; ++r) x[r] = y[r] = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
        for (int r = 0; r < STEP; ++r) {
          const __m512 a = _mm512_loadu_ps(p + r * K + c * 16);
          x[r] = _mm512_fmadd_ps(a, k[c], x[r]);
          y[r] = _mm512_fmadd_ps(a, q[c], y[r]);
        }
      }
      finish4(h, sums(x), sums(y), v + i + r0, d + r0, o + i + r0);
    }
    for (int r = 0; r < BLOCK; ++r) {
      const float* p = s + r * K;
      const __m512 d16 = _mm512_set1_ps(d[r]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        if (STREAM) prefetch(p + AHEAD * K + c * 16);
        const __m512 a = _mm512_mul_ps(g, _mm512_loadu_ps(p + c * 16));
        const __m512 b = _mm512_fmadd_ps(d16, k[c], a);
        if (STREAM) _mm512_stream_ps(n + r * K + c * 16, b);
        else _mm512_storeu_ps(n + r * K + c * 16, b);
      }
    }
  }
  if (STREAM) _mm_sfence();
}
#endif  // GDN_X86

// The fastest version for this CPU. stream: write past the cache, which is too small for the state; needs 64-byte aligned `n`.
inline Rows pick_rows(bool stream) {
#ifdef GDN_X86
  static const bool avx512 = 
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512 && avx2) return stream ? rows_avx512<true> : rows_avx512<false>;
  if (avx2) return stream ? rows_avx2<true> : rows_avx2<false>;
#endif
  (void)stream;
  return rows_portable<Bf16>;
}

}  // namespace gdn
