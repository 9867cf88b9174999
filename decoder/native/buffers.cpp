// Buffers, and what is computed once for the whole vocabulary.
#include "engine.h"

#include <algorithm>

static int product_width(const Matrix& m) { return static_cast<int>(round_up(m.n, GROUP)); }

Engine::Engine(const Model& model)
    : m(model),
      layers(model.layers, model.layers + model.num_layers),
      team(model.prefill_threads),
      alone(1),
      channels16(round_up(2 * model.key_heads * model.key_dim + model.value_heads * model.value_dim, LANES)),
      value16(round_up(model.value_dim, LANES)),
      head16(round_up(model.head_dim, LANES)),
      query_scale(1.0f / std::sqrt(static_cast<float>(model.key_dim))) {
  int proj_width = 0, kv_width = 0;
  std::vector<const Layer*> all;
  for (const Layer& layer : layers) all.push_back(&layer);
  if (m.has_mtp) {
    mtp_layer = *m.mtp_layer;
    all.push_back(&mtp_layer);
  }
  for (const Layer* layer : all) {
    proj_width = std::max(proj_width, product_width(layer->in_proj));
    if (layer->is_attention) kv_width = std::max(kv_width, product_width(layer->kv_proj));
  }
  allocate(proj_width, kv_width);
  fill_tables();
}

void Engine::allocate(int proj_width, int kv_width) {
  const int hidden_width = static_cast<int>(round_up(m.hidden, GROUP));
  const int mixed_width = std::max(m.heads * m.head_dim, m.value_heads * m.value_dim);
  x.allocate(MAX_ROWS, hidden_width);
  normed.allocate(MAX_ROWS, hidden_width);
  hidden.allocate(MAX_ROWS, hidden_width);
  proj.allocate(MAX_ROWS, proj_width);
  kv.allocate(MAX_ROWS, kv_width);
  qkv.allocate(MAX_ROWS, channels16);
  queries.allocate(MAX_ROWS, m.key_heads * m.key_dim);
  beta.allocate(MAX_ROWS, m.value_heads);
  out.allocate(MAX_ROWS, m.value_heads * value16);
  mixed.allocate(MAX_ROWS, mixed_width);
  act.allocate(MAX_ROWS, round_up(m.inner, GROUP));
  logits.allocate(MAX_VERIFY_ROWS, round_up(m.vocab, GROUP));
  backlog.allocate(MAX_BACKLOG, hidden_width);
  const auto allocate_pending = [&](PendingRows& kept, int rows) {
    kept.inputs.allocate(rows, channels16);
    kept.keys.allocate(rows, m.key_heads * m.key_dim);
    kept.log_decay.allocate(rows, m.value_heads);
    kept.delta.allocate(rows, m.value_heads * value16);
  };
  allocate_pending(shared, MAX_ROWS);
  pending.resize(layers.size());
  for (size_t i = 0; i < layers.size(); ++i)
    if (!layers[i].is_attention) allocate_pending(pending[i], MAX_VERIFY_ROWS);
  members.resize(team.size());
  const int most_queries = ROW_BLOCK * (m.heads / m.kv_heads);
  for (Member& own : members) {
    own.scratch.allocate(1, std::max(chunk_scratch(m.key_dim, value16), static_cast<long>(m.key_dim) * GROUP));
    own.query.allocate(1, static_cast<long>(most_queries) * m.head_dim);
    own.mixed.allocate(1, static_cast<long>(most_queries) * head16);
    own.mass.allocate(1, static_cast<long>(most_queries) * LANES);
    own.peak.allocate(1, most_queries);
  }
  mtp_x.allocate(m.has_mtp ? MAX_ROWS : 0, hidden_width);
  mtp_normed.allocate(m.has_mtp ? MAX_ROWS : 0, hidden_width);
  mtp_hidden.allocate(1, hidden_width);
}

void Engine::fill_tables() {
  const Layer& layer = layers[0];
  const long first_width = proj.stride + (layer.is_attention ? kv.stride : 0);
  const auto fits = [&](long width) { return m.vocab * width <= m.table_floats; };
  Rows fc_rows, first_rows;  // tables while they are filled: until then nobody reads them
  if (m.has_mtp && fits(x.stride)) fc_rows.allocate(m.vocab, x.stride);
  if (fits(first_width)) first_rows.allocate(m.vocab, first_width);
  team.run([&](int) {
    team.tasks((m.vocab + ROW_BLOCK - 1) / ROW_BLOCK, [&](int block) {
      Rows embedded;
      embedded.allocate(ROW_BLOCK, m.hidden);
      const int first = block * ROW_BLOCK, count = std::min(ROW_BLOCK, m.vocab - first);
      const auto normed_embeddings = [&](const float* weight) {
        for (int r = 0; r < count; ++r) {
          embed(first + r, embedded.row(r));
          rms_norm(embedded.row(r), weight, m.hidden, m.eps, embedded.row(r));
        }
      };
      if (fc_rows.stride) {
        normed_embeddings(m.embedding_norm);
        linear(m.fc_embedding, embedded.row(0), embedded.stride, count, fc_rows.row(first), fc_rows.stride);
      }
      if (!first_rows.stride) return;
      normed_embeddings(layer.mixer_norm);
      float* to = first_rows.row(first);
      linear(layer.in_proj, embedded.row(0), embedded.stride, count, to, first_rows.stride);
      if (layer.is_attention)
        linear(layer.kv_proj, embedded.row(0), embedded.stride, count, to + proj.stride, first_rows.stride);
    });
  });
  std::swap(fc_table, fc_rows);
  std::swap(first_table, first_rows);
}

void Engine::embed(int64_t id, float* to) const {
  if (!m.embedding_is_bf16) {
    std::memcpy(to, static_cast<const float*>(m.embedding) + id * m.hidden, m.hidden * sizeof(float));
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(m.embedding) + id * m.hidden;
  for (int i = 0; i < m.hidden; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

// fc's half that reads the embedding of `id`, [hidden].
void Engine::fc_embedding(int64_t id, float* scratch, float* to) const {
  if (fc_table.stride) {
    std::memcpy(to, fc_table.row(id), m.hidden * sizeof(float));
    return;
  }
  embed(id, scratch);
  rms_norm(scratch, m.embedding_norm, m.hidden, m.eps, scratch);
  linear(m.fc_embedding, scratch, 0, 1, to, 0);
}
