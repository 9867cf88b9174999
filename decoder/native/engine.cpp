// One sequence: prompts, verification, commit.
#include "engine.h"

#include <algorithm>

// Token ids at positions start ... -> hidden rows after the final norm, of those that are read. A prefill commits as it
// goes; a verify leaves its GDN rows pending. Called by every member of the team.
void Engine::forward(Team& team, int member, const int64_t* ids, int rows, int64_t start, Omitted omitted,
                     bool is_prefill) {
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
    const bool is_last = i + 1 == layers.size();
    const int begin = is_last ? omitted.skipped : 0;  // rows that the mixer serves
    PendingRows& kept = is_prefill ? shared : pending[i];
    by_rows([&](int first, int count) {
      if (i == 0) {
        project_first(ids, first, count, begin);
      } else {
        normalise(layer.mixer_norm, first, count, normed);
        project(layer, first, count, begin);
      }
      if (!layer.is_attention) return;
      const int from = std::clamp(begin, first, first + count);
      turn_queries(from, first + count - from, layer.q_norm, start);
      store_keys(layer, first, count, start);
    });
    if (layer.is_attention) {
      team.tasks(blocks * m.kv_heads, [&](int task) {
        const int block = blocks - 1 - task / m.kv_heads;  // the longest first
        const int first = std::max(block * ROW_BLOCK, begin), end = std::min((block + 1) * ROW_BLOCK, rows);
        if (first < end) attend_rows(layer, own, task % m.kv_heads, first, end - first, start);
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
      const int from = std::clamp(begin, first, first + count);
      if (!layer.is_attention) gdn_gate(layer, from, first + count - from);
      const int read = std::clamp(is_last ? omitted.unread : 0, first, first + count);
      finish_layer(layer, x.row(0), normed.row(0), read, first + count - read, begin);
      if (is_last) normalise(m.final_norm, read, first + count - read, hidden);
    });
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

// Back to an empty sequence; caches need no clearing. The MTP head will read it from position `mtp_origin` on.
void Engine::reset(int64_t mtp_origin) {
  for (const Layer& layer : layers) {
    if (layer.is_attention) continue;
    std::memset(layer.first, 0, sizeof(float) * m.value_heads * m.key_dim * value16);
    std::memset(layer.second, 0, sizeof(float) * (m.conv_width - 1) * channels16);
  }
  context_length = 0;
  mtp_length = mtp_layer.origin = mtp_origin;
  backlog_rows = 0;
}

// Read the next rows of a prompt; `following` of them have a known next token, which the MTP head reads too from its
// origin on. The first `skipped` rows are there for its keys and values alone.
void Engine::prefill(const int64_t* ids, int rows, int64_t start, int skipped, int following) {
  const int unread = static_cast<int>(std::clamp<int64_t>(mtp_length - start, 0, skipped));
  const int read = m.has_mtp ? following - unread : 0;
  team.run([&](int member) {
    forward(team, member, ids, rows, start, {unread, skipped}, true);
    team.tasks((read + ROW_BLOCK - 1) / ROW_BLOCK, [&](int block) {
      const int done = block * ROW_BLOCK;
      mtp_keys(ids + 1, hidden.row(0), hidden.stride, unread + done, std::min(ROW_BLOCK, read - done), start);
    });
  });
  context_length = start + rows;
  mtp_length += read;
}

// After the last prefill: the first new token, from row `last_row` of that forward.
int64_t Engine::first_token(int last_row) {
  score(m.head, hidden.row(last_row), hidden.stride, 1);
  last_token = argmax(logits.row(0), m.vocab);
  backlog_rows = 1;
  backlog_tokens[0] = last_token;
  std::memcpy(backlog.row(0), hidden.row(last_row), m.hidden * sizeof(float));
  return last_token;
}

// Verify `count` drafts after the last token, commit what was right: tokens [accepted + 1] -> accepted.
int Engine::step(const int64_t* drafts, int count, int64_t* tokens) {
  int64_t ids[MAX_VERIFY_ROWS];
  ids[0] = last_token;
  std::copy(drafts, drafts + count, ids + 1);
  forward(alone, 0, ids, count + 1, context_length, {0, 0}, false);
  score(m.head, hidden.row(0), hidden.stride, count + 1);
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
