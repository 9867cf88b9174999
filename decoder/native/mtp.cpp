// The multi-token-prediction head: its keys and values over the sequence, and drafts by recursion.
#include "engine.h"

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
  finish_layer(mtp_layer, mtp_x.row(0), mtp_normed.row(0), row, 1, 0);
  rms_norm(mtp_x.row(row), m.mtp_norm, m.hidden, m.eps, mtp_hidden.row(0));
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
    score(m.draft_head, mtp_hidden.row(0), 0, 1);
    const int likeliest = argmax(logits.row(0), m.draft_head.n);
    drafts[i] = m.draft_ids ? m.draft_ids[likeliest] : likeliest;
    if (i + 1 == count) return;
    mtp_keys(drafts + i, mtp_hidden.row(0), 0, 0, 1, context_length + i);
    mtp_finish(0, context_length + i);
  }
}
