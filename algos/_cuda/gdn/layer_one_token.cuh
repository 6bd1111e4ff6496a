// layer_post_conv for one token of each row: layer_decode.cuh's kernel without its convolution, which reads a state as packed decode
// does. Constants from results/h200/layer-decode-variants.jsonl, by B * HV.
#pragma once

#include "tuned.h"  // which tuned_row.cuh wants; it is of several tokens

#include "layer_decode_launch.cuh"

namespace gdn {

struct OneToken {
  struct Row { int sms; int64_t up_to; int lanes, rows, passes, warps, load, store, resident; };
  static constexpr Row rows[] = {
      {132, 16, 8, 1, 1, 8, 2, 0, 1},
      {132, 181, 16, 4, 1, 8, 2, 0, 1},
      {132, 400, 16, 4, 2, 4, 2, 0, 24},
      {132, 1024, 16, 4, 4, 2, 2, 0, 1},
      {132, INT64_MAX, 16, 4, 2, 8, 2, 0, 24},
  };
};

template <typename T>
void launch_one_token(const LayerDecode<PlainPool<T>>& p, int64_t heads, int device, cudaStream_t stream) {
  launch_layer_decode<OneToken, false>(p, heads, 1, device, stream);
}

}  // namespace gdn
