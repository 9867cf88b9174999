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
  fill_tables();
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

// The first layer's projections of the embeddings of `ids`.
void Engine::project_first(const int64_t* ids, int first, int rows) {
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
  if (!first_table.stride) project(layers[0], first, rows);
}

void Engine::project(const Layer& layer, int first, int rows) {
  linear(layer.in_proj, normed.row(first), normed.stride, rows, proj.row(first), proj.stride);
  if (layer.is_attention) linear(layer.kv_proj, normed.row(first), normed.stride, rows, kv.row(first), kv.stride);
}

// Keys (normed, rotated) and values of rows first ... at positions start + row, from kv into the layer's cache.
void Engine::store_keys(const Layer& layer, int first, int rows, int64_t start) {
  const int dim = m.head_dim, width = m.kv_heads * dim;
  for (int r = first; r < first + rows; ++r) {
    const int64_t position = start + r;
    for (int h = 0; h < m.kv_heads; ++h) {
      float* key = kv.row(r) + h * dim;
      rms_norm(key, layer.k_norm, dim, m.eps, key);
      rotate(key, m.cosine + position * m.rotary_half, m.sine + position * m.rotary_half, m.rotary_half);
      write_key(layer.first + h * layer.capacity * dim, position, dim, key);
      const float* value = kv.row(r) + width + h * dim;
      float* to = layer.second + (h * layer.capacity + position) * head16;
      for (int c = 0; c < dim; c += LANES) store(to + c, load(value + c, dim - c));
    }
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
  attend(scratch, rows * group, group, start + first, layer.first + kv_head * layer.capacity * dim,
         layer.second + kv_head * layer.capacity * head16, dim, head16);
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
  const float* inputs[16];
  for (int r = first; r < first + rows; ++r) {
    for (int t = 0; t < m.conv_width; ++t) {
      const int from = r + t - before;
      inputs[t] = from < 0 ? layer.second + (before + from) * static_cast<long>(channels16) : proj.row(from);
    }
    convolve(inputs, layer.taps, m.conv_width, channels16, qkv.row(r));
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

// x += out_proj(mixed), then x += mlp(norm(x)).
void Engine::finish_layer(const Layer& layer, float* x_rows, float* normed_rows, int first, int rows) {
  const long stride = x.stride;
  float *own = x_rows + first * stride, *own_normed = normed_rows + first * stride;
  add_linear(layer.out_proj, mixed.row(first), mixed.stride, rows, own, stride);
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

// Token ids at positions start ... -> hidden rows after the final norm. A prefill commits as it goes; a verify leaves
// its GDN rows pending. Called by every member of the team.
void Engine::forward(Team& team, int member, const int64_t* ids, int rows, int64_t start, bool is_prefill) {
  Member& own = members[member];
  const int blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  const auto by_rows = [&](auto&& task) {
    team.tasks(blocks, [&](int block) {
      task(block * ROW_BLOCK, std::min(ROW_BLOCK, rows - block * ROW_BLOCK));
    });
  };
  const auto normalise = [&](const float* weight, int first, int count, Rows& to) {
    for (int r = first; r < first + count; ++r) rms_norm(x.row(r), weight, m.hidden, m.eps, to.row(r));
  };
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    PendingRows& kept = is_prefill ? shared : pending[i];
    by_rows([&](int first, int count) {
      if (i == 0) {
        project_first(ids, first, count);
      } else {
        normalise(layer.mixer_norm, first, count, normed);
        project(layer, first, count);
      }
      if (!layer.is_attention) return;
      turn_queries(first, count, layer.q_norm, start);
      store_keys(layer, first, count, start);
    });
    if (layer.is_attention) {
      team.tasks(blocks * m.kv_heads, [&](int task) {
        const int block = blocks - 1 - task / m.kv_heads;  // the longest first
        attend_rows(layer, own, task % m.kv_heads, block * ROW_BLOCK, std::min(ROW_BLOCK, rows - block * ROW_BLOCK),
                    start);
      });
    } else {
      by_rows([&](int first, int count) { gdn_rows(layer, kept, first, count); });
      team.tasks(m.value_heads, [&](int head) { gdn_head(layer, kept, own, head, rows, is_prefill); });
      if (is_prefill) {
        if (member == 0) push_window(layer, proj.row(0), proj.stride, rows);
      } else {
        for (int r = 0; r < rows; ++r) std::memcpy(kept.inputs.row(r), proj.row(r), channels16 * sizeof(float));
      }
    }
    by_rows([&](int first, int count) {
      if (!layer.is_attention) gdn_gate(layer, first, count);
      finish_layer(layer, x.row(0), normed.row(0), first, count);
      if (i + 1 == layers.size()) normalise(m.final_norm, first, count, hidden);
    });
  }
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

void Engine::commit(int kept) {
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].is_attention) continue;
    for (int head = 0; head < m.value_heads; ++head)
      delta_commit(delta_head(pending[i], head, 0), layers[i].first + static_cast<long>(head) * m.key_dim * value16, kept);
    push_window(layers[i], pending[i].inputs.row(0), pending[i].inputs.stride, kept);
  }
}

// Logits of `count` rows.
static void head_rows(const Matrix& head, const float* rows, long stride, int count, Rows& logits) {
  linear(head, rows, stride, count, logits.row(0), logits.stride);
}

// Keys and values of the MTP layer for rows first ... : tokens [r] follow positions start + r with these hidden rows.
void Engine::mtp_keys(const int64_t* tokens, const float* hidden_rows, long stride, int first, int rows, int64_t start) {
  for (int r = first; r < first + rows; ++r) {
    fc_embedding(tokens[r], mtp_normed.row(r), mtp_x.row(r));
    rms_norm(hidden_rows + r * stride, m.hidden_norm, m.hidden, m.eps, mtp_normed.row(r));
  }
  add_linear(m.fc_hidden, mtp_normed.row(first), mtp_normed.stride, rows, mtp_x.row(first), mtp_x.stride);
  for (int r = first; r < first + rows; ++r)
    rms_norm(mtp_x.row(r), mtp_layer.mixer_norm, m.hidden, m.eps, mtp_normed.row(r));
  linear(mtp_layer.kv_proj, mtp_normed.row(first), mtp_normed.stride, rows, kv.row(first), kv.stride);
  store_keys(mtp_layer, first, rows, start);
}

// The rest of the MTP layer for one row after mtp_keys: its hidden state into mtp_hidden.
void Engine::mtp_finish(int row, int64_t position) {
  const int64_t start = position - row;
  linear(mtp_layer.in_proj, mtp_normed.row(row), mtp_normed.stride, 1, proj.row(row), proj.stride);
  turn_queries(row, 1, mtp_layer.q_norm, start);
  for (int h = 0; h < m.kv_heads; ++h) attend_rows(mtp_layer, members[0], h, row, 1, start);
  finish_layer(mtp_layer, mtp_x.row(0), mtp_normed.row(0), row, 1);
  rms_norm(mtp_x.row(row), m.mtp_norm, m.hidden, m.eps, mtp_hidden.row(0));
}

// Back to an empty sequence; caches need no clearing.
void Engine::reset() {
  for (const Layer& layer : layers) {
    if (layer.is_attention) continue;
    std::memset(layer.first, 0, sizeof(float) * m.value_heads * m.key_dim * value16);
    std::memset(layer.second, 0, sizeof(float) * (m.conv_width - 1) * channels16);
  }
  context_length = mtp_length = 0;
  backlog_rows = 0;
}

// Read the next rows of a prompt; `following` of them have a known next token, which the MTP head reads too.
void Engine::prefill(const int64_t* ids, int rows, int64_t start, int following) {
  team.run([&](int member) {
    forward(team, member, ids, rows, start, true);
    if (!m.has_mtp) return;
    team.tasks((following + ROW_BLOCK - 1) / ROW_BLOCK, [&](int block) {
      const int first = block * ROW_BLOCK;
      mtp_keys(ids + 1, hidden.row(0), hidden.stride, first, std::min(ROW_BLOCK, following - first), start);
    });
  });
  context_length = start + rows;
  mtp_length = start + following;
}

// After the last prefill: the first new token, from row `last_row` of that forward.
int64_t Engine::first_token(int last_row) {
  head_rows(m.head, hidden.row(last_row), hidden.stride, 1, logits);
  last_token = argmax(logits.row(0), m.vocab);
  backlog_rows = 1;
  backlog_tokens[0] = last_token;
  std::memcpy(backlog.row(0), hidden.row(last_row), m.hidden * sizeof(float));
  return last_token;
}

// The MTP head reads the committed positions it has not read, with their true hidden states.
void Engine::read_backlog(bool finish) {
  mtp_keys(backlog_tokens, backlog.row(0), backlog.stride, 0, backlog_rows, mtp_length);
  mtp_length += backlog_rows;
  if (finish) mtp_finish(backlog_rows - 1, mtp_length - 1);
  backlog_rows = 0;
}

void Engine::draft(int count, int64_t* drafts) {
  read_backlog(true);
  for (int i = 0;; ++i) {
    head_rows(m.draft_head, mtp_hidden.row(0), 0, 1, logits);
    const int likeliest = argmax(logits.row(0), m.draft_head.n);
    drafts[i] = m.draft_ids ? m.draft_ids[likeliest] : likeliest;
    if (i + 1 == count) return;
    mtp_keys(drafts + i, mtp_hidden.row(0), 0, 0, 1, context_length + i);
    mtp_finish(0, context_length + i);
  }
}

// Verify `count` drafts after the last token, commit what was right: tokens [accepted + 1] -> accepted.
int Engine::step(const int64_t* drafts, int count, int64_t* tokens) {
  int64_t ids[MAX_VERIFY_ROWS];
  ids[0] = last_token;
  std::copy(drafts, drafts + count, ids + 1);
  forward(alone, 0, ids, count + 1, context_length, false);
  head_rows(m.head, hidden.row(0), hidden.stride, count + 1, logits);
  for (int r = 0; r <= count; ++r) tokens[r] = argmax(logits.row(r), m.vocab);
  int accepted = 0;
  while (accepted < count && drafts[accepted] == tokens[accepted]) ++accepted;
  const int kept = accepted + 1;
  commit(kept);
  context_length += kept;
  for (int r = 0; m.has_mtp && r < kept; ++r, ++backlog_rows) {
    backlog_tokens[backlog_rows] = tokens[r];
    std::memcpy(backlog.row(backlog_rows), hidden.row(r), m.hidden * sizeof(float));
  }
  last_token = tokens[accepted];
  return accepted;
}
