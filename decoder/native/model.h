// What Python hands over: shapes, packed weights and state memory. layout.py has the same structures for ctypes.
#pragma once

#include "gemm.h"

struct Layer {
  const float *mixer_norm, *mlp_norm;  // 1 + w
  Matrix in_proj;                      // attention: q | gate; GDN: qkv | z | b | a
  Matrix kv_proj;                      // attention: k | v
  Matrix out_proj;
  Matrix gate_up;  // groups of 64 outputs: 32 of gate, then 32 of up
  Matrix down;
  const float *q_norm, *k_norm;  // attention: 1 + w, queries times head_dim^-0.5 log2 e too
  const float *taps;             // GDN: [width][channels16], oldest input first
  const float *negative_rate, *dt_bias, *out_norm;
  uint16_t *half_keys, *half_values;  // MTP: what drafts read, or null; they never change the output
  float *first, *second;  // attention: keys, values; GDN: S [heads][key_dim][value16], window [width - 1][channels16]
  int64_t capacity;       // attention: positions that fit, a multiple of 64
  int64_t is_attention;
  int64_t origin;  // position of the first key and value: 0 but for the MTP layer, which may read a prompt's end alone
};

struct Model {
  int32_t hidden, inner, vocab, num_layers;
  int32_t heads, kv_heads, head_dim, rotary_half;
  int32_t key_heads, value_heads, key_dim, value_dim;  // GDN; dimensions of one head
  int32_t conv_width, has_mtp, embedding_is_bf16, prefill_threads;
  float eps, unused;
  int64_t table_floats;  // the most a table by token may hold (engine.h)
  const Layer *layers, *mtp_layer;
  const void* embedding;  // [vocab, hidden], fp32 or bf16
  Matrix head;
  Matrix draft_head;         // of the tokens that may be drafted
  const int64_t* draft_ids;  // the token of each of its outputs; null where they are the vocabulary
  const float* final_norm;
  const float *embedding_norm, *hidden_norm, *mtp_norm;
  Matrix fc_embedding, fc_hidden;
  const float *cosine, *sine;  // [context, rotary_half]
};
