// The parts of a layer, for some rows or one head each: what `forward` shares out.
#include "engine.h"

#include <algorithm>

// The first layer's projections of the embeddings of `ids`, as `project` has them.
void Engine::project_first(const int64_t* ids, int first, int rows, int skipped) {
  for (int r = first; r < first + rows; ++r) {
    embed(ids[r], x.row(r));
    if (!first_table.stride) {
      rms_norm(x.row(r), layers[0].mixer_norm, m.hidden, m.eps, normed.row(r));
      continue;
    }
    const float* from = first_table.row(ids[r]);
    std::memcpy(proj.row(r), from, proj.stride * sizeof(float));
    if (layers[0].is_attention) std::memcpy(kv.row(r), from + proj.stride, kv.stride * sizeof(float));
  }
  if (!first_table.stride) project(layers[0], first, rows, skipped);
}

// Projections of rows first ...; where the layer attends, rows before `skipped` get keys and values alone.
void Engine::project(const Layer& layer, int first, int rows, int skipped) {
  const int from = layer.is_attention ? std::clamp(skipped, first, first + rows) : first;
  linear(layer.in_proj, normed.row(from), normed.stride, first + rows - from, proj.row(from), proj.stride);
  if (layer.is_attention) linear(layer.kv_proj, normed.row(first), normed.stride, rows, kv.row(first), kv.stride);
}

// Keys (normed, rotated) and values of rows first ... at positions start + row, from kv into the layer's cache.
void Engine::store_keys(const Layer& layer, int first, int rows, int64_t start) {
  const int dim = m.head_dim, width = m.kv_heads * dim;
  for (int r = first; r < first + rows; ++r) {
    const int64_t position = start + r, slot = position - layer.origin;
    for (int h = 0; h < m.kv_heads; ++h) {
      float* key = kv.row(r) + h * dim;
      rms_norm(key, layer.k_norm, dim, m.eps, key);
      rotate(key, m.cosine + position * m.rotary_half, m.sine + position * m.rotary_half, m.rotary_half);
      write_key(layer.first + h * layer.capacity * dim, slot, dim, key, 0, dim);
      const float* value = kv.row(r) + width + h * dim;
      float* to = layer.second + (h * layer.capacity + slot) * head16;
      for (int c = 0; c < dim; c += LANES) store(to + c, load(value + c, dim - c));
      if (layer.half_keys) store_half_row(layer, h, slot, key, value);
    }
  }
}

void Engine::store_half_row(const Layer& layer, int kv_head, int64_t slot, const float* key, const float* value) {
  const int dim = m.head_dim;
  uint16_t halves[LANES];
  uint16_t* to = layer.half_values + (kv_head * layer.capacity + slot) * head16;
  for (int c = 0; c < dim; c += LANES) {
    store_halves(to + c, load(value + c, dim - c));
    store_halves(halves, load(key + c, dim - c));
    const int count = dim - c < LANES ? dim - c : LANES;
    write_key(layer.half_keys + kv_head * layer.capacity * dim, slot, dim, halves, c, count);
  }
}

// Queries of rows first ... in proj: normed and rotated.
void Engine::turn_queries(int first, int rows, const float* norm, int64_t start) {
  for (int r = first; r < first + rows; ++r) {
    const float *cosine = m.cosine + (start + r) * m.rotary_half, *sine = m.sine + (start + r) * m.rotary_half;
    for (int h = 0; h < m.heads; ++h) {
      float* query = proj.row(r) + h * m.head_dim;
      rms_norm(query, norm, m.head_dim, m.eps, query);
      rotate(query, cosine, sine, m.rotary_half);
    }
  }
}

// One kv head's query heads for rows first ... (at most ROW_BLOCK), gated, into mixed.
void Engine::attend_rows(const Layer& layer, Member& own, int kv_head, int first, int rows, int64_t start) {
  const int dim = m.head_dim, group = m.heads / m.kv_heads;
  const AttentionScratch scratch{own.query.row(0), own.mixed.row(0), own.mass.row(0), own.peak.row(0)};
  for (int r = 0; r < rows; ++r)
    std::memcpy(scratch.query + r * group * dim, proj.row(first + r) + kv_head * group * dim,
                group * dim * sizeof(float));
  const long keys = kv_head * layer.capacity * dim, values = kv_head * layer.capacity * head16;
  const long slot = start + first - layer.origin;
  if (layer.half_keys)
    attend(scratch, rows * group, group, slot, layer.half_keys + keys, layer.half_values + values, dim, head16);
  else
    attend(scratch, rows * group, group, slot, layer.first + keys, layer.second + values, dim, head16);
  for (int r = 0; r < rows; ++r)
    for (int g = 0; g < group; ++g) {
      const int h = kv_head * group + g;
      gate_by_sigmoid(scratch.mixed + static_cast<long>(r * group + g) * head16,
                      proj.row(first + r) + (m.heads + h) * dim, dim, mixed.row(first + r) + h * dim);
    }
}

// Convolution, unit keys and queries, gates of rows first ...; every row's projections are there already.
void Engine::gdn_rows(const Layer& layer, PendingRows& kept, int first, int rows) {
  const int before = m.conv_width - 1, key_width = m.key_heads * m.key_dim;
  const int gates = 2 * key_width + 2 * m.value_heads * m.value_dim;  // b | a start here
  std::vector<const float*> inputs(m.conv_width);
  for (int r = first; r < first + rows; ++r) {
    for (int t = 0; t < m.conv_width; ++t) {
      const int from = r + t - before;
      inputs[t] = from < 0 ? layer.second + (before + from) * static_cast<long>(channels16) : proj.row(from);
    }
    convolve(inputs.data(), layer.taps, m.conv_width, channels16, qkv.row(r));
    for (int h = 0; h < m.key_heads; ++h) {
      const float* query = qkv.row(r) + h * m.key_dim;
      unit_row(query, m.key_dim, L2_EPS, query_scale, queries.row(r) + h * m.key_dim);
      unit_row(query + key_width, m.key_dim, L2_EPS, 1.0f, kept.keys.row(r) + h * m.key_dim);
    }
    const float *b = proj.row(r) + gates, *a = b + m.value_heads;
    decay_gates(b, a, layer.dt_bias, layer.negative_rate, m.value_heads, beta.row(r), kept.log_decay.row(r));
  }
}

DeltaHead Engine::delta_head(PendingRows& kept, int head, int row) const {
  const int key_head = head / (m.value_heads / m.key_heads);
  DeltaHead h;
  h.query = queries.row(row) + key_head * m.key_dim;
  h.key = kept.keys.row(row) + key_head * m.key_dim;
  h.value = qkv.row(row) + 2 * m.key_heads * m.key_dim + head * m.value_dim;
  h.key_stride = queries.stride;
  h.value_stride = qkv.stride;
  h.log_decay = kept.log_decay.row(row) + head;
  h.beta = beta.row(row) + head;
  h.gate_stride = beta.stride;
  h.delta = kept.delta.row(row) + head * value16;
  h.out = out.row(row) + head * value16;
  h.out_stride = out.stride;
  h.key_dim = m.key_dim;
  h.value16 = value16;
  return h;
}

void Engine::gdn_head(const Layer& layer, PendingRows& kept, Member& own, int head, int rows, bool is_prefill) {
  float* state = layer.first + static_cast<long>(head) * m.key_dim * value16;
  if (!is_prefill) return delta_rows(delta_head(kept, head, 0), state, rows, own.scratch.row(0));
  for (int row = 0; row < rows; row += CHUNK)
    delta_chunk(delta_head(kept, head, row), state, std::min(CHUNK, rows - row), own.scratch.row(0));
}

// Gated norm of rows first ... into mixed.
void Engine::gdn_gate(const Layer& layer, int first, int rows) {
  const int z = 2 * m.key_heads * m.key_dim + m.value_heads * m.value_dim;
  for (int r = first; r < first + rows; ++r)
    for (int h = 0; h < m.value_heads; ++h)
      gated_norm(out.row(r) + h * value16, layer.out_norm, proj.row(r) + z + h * m.value_dim, m.value_dim, m.eps,
                 mixed.row(r) + h * m.value_dim);
}

// x += out_proj(mixed) from row `skipped` on, then x += mlp(norm(x)).
void Engine::finish_layer(const Layer& layer, float* x_rows, float* normed_rows, int first, int rows, int skipped) {
  const long stride = x.stride;
  const int from = std::clamp(skipped, first, first + rows);
  float *own = x_rows + first * stride, *own_normed = normed_rows + first * stride;
  add_linear(layer.out_proj, mixed.row(from), mixed.stride, first + rows - from, x_rows + from * stride, stride);
  for (int r = 0; r < rows; ++r) rms_norm(own + r * stride, layer.mlp_norm, m.hidden, m.eps, own_normed + r * stride);
  product(layer.gate_up, own_normed, stride, rows, [&](int begin, int size, int column, int, const float* tile) {
    for (int r = 0; r < size; ++r)
      for (int c = 0; c < GROUP / 2; c += LANES) {
        const F16 gate = load(tile + r * GROUP + c), up = load(tile + r * GROUP + GROUP / 2 + c);
        store(act.row(first + begin + r) + column / 2 + c, silu(gate) * up);
      }
  });
  add_linear(layer.down, act.row(first), act.stride, rows, own, stride);
}

// The last conv_width - 1 inputs of window | rows become the window.
void Engine::push_window(const Layer& layer, const float* inputs, long stride, int rows) {
  const int held = m.conv_width - 1;
  for (int w = 0; w < held; ++w) {
    const int from = w + rows;  // among the held ones, then the rows
    const float* source = from < held ? layer.second + from * static_cast<long>(channels16) : inputs + (from - held) * stride;
    std::memmove(layer.second + w * static_cast<long>(channels16), source, channels16 * sizeof(float));
  }
}
