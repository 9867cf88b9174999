// One sequence: buffers, and the forward of a few rows (verify) or of many (prefill, shared by a team).
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "delta_rule.h"
#include "model.h"
#include "team.h"

constexpr int MAX_ROWS = 768;  // of one forward: whole GDN chunks and row blocks
constexpr int ROW_BLOCK = 48;  // rows of one task: their activations stay in the L2 cache
constexpr int MAX_BACKLOG = 32;
constexpr float L2_EPS = 1e-6f;

// Rows of floats, 64-byte aligned, zero at first.
class Rows {
 public:
  void allocate(long rows, long width) {
    stride = round_up(width, LANES);
    const size_t bytes = round_up((rows * stride + 4 * GROUP) * sizeof(float), 64);
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (!memory_) throw std::bad_alloc();
    std::memset(memory_.get(), 0, bytes);
  }
  float* row(long r) const { return memory_.get() + r * stride; }
  long stride = 0;

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
};

// What a GDN layer keeps of its rows between forward and commit.
struct PendingRows {
  Rows inputs, keys, log_decay, delta;
};

// What rows of a prompt do without in the last layer, since nobody needs it of them: the first `unread` leave the mixer's
// state and nothing else, those from there to `skipped` go through all but the mixer.
struct Omitted {
  int unread, skipped;
};

class Engine {
 public:
  explicit Engine(const Model& model);

  const Model m;
  std::vector<Layer> layers;
  Layer mtp_layer;
  Team team, alone;

  int64_t context_length = 0;
  int64_t mtp_length = 0;
  int64_t last_token = 0;
  int backlog_rows = 0;
  int64_t backlog_tokens[MAX_BACKLOG];
  Rows backlog;  // [MAX_BACKLOG, hidden]

  void reset(int64_t mtp_origin);
  void prefill(const int64_t* ids, int rows, int64_t start, int skipped, int following);
  int64_t first_token(int last_row);
  void draft(int count, int64_t* drafts);
  int step(const int64_t* drafts, int count, int64_t* tokens);
  void read_backlog(bool finish);
  void forward(Team& team, int member, const int64_t* ids, int rows, int64_t start, Omitted omitted, bool is_prefill);

  Rows hidden;  // [MAX_ROWS, hidden] after the final norm
  Rows logits;  // [MAX_VERIFY_ROWS, vocab]

 private:
  struct Member {
    Rows scratch;
    Rows query, mixed, mass, peak;
  };

  int channels16, value16, head16;
  float query_scale;
  Rows x, normed, proj, kv, qkv, queries, beta, mixed, act, out;
  PendingRows shared;  // a prefill's
  std::vector<PendingRows> pending;
  // What depends on a token alone, computed once for the vocabulary where that is small: fc's embedding half, and the
  // first layer's projections (in_proj, then kv_proj). A copy of a row then replaces a product; the bits are the same.
  Rows fc_table, first_table;
  Rows mtp_x, mtp_normed, mtp_hidden;
  std::vector<Member> members;

  void embed(int64_t id, float* out) const;
  void fc_embedding(int64_t id, float* scratch, float* out) const;
  void allocate(int proj_width, int kv_width);
  void fill_tables();
  void project_first(const int64_t* ids, int first, int rows, int skipped);
  void project(const Layer& layer, int first, int rows, int skipped);
  void store_keys(const Layer& layer, int first, int rows, int64_t start);
  void store_half_row(const Layer& layer, int kv_head, int64_t slot, const float* key, const float* value);
  void turn_queries(int first, int rows, const float* norm, int64_t start);
  void attend_rows(const Layer& layer, Member& own, int kv_head, int first, int rows, int64_t start);
  void gdn_rows(const Layer& layer, PendingRows& kept, int first, int rows);
  void gdn_head(const Layer& layer, PendingRows& kept, Member& own, int head, int rows, bool is_prefill);
  void gdn_gate(const Layer& layer, int first, int rows);
  void finish_layer(const Layer& layer, float* x_rows, float* normed_rows, int first, int rows, int skipped);
  DeltaHead delta_head(PendingRows& kept, int head, int row) const;
  void mtp_keys(const int64_t* tokens, const float* hidden_rows, long stride, int first, int rows, int64_t start);
  void mtp_finish(int row, int64_t position);
  void commit(int kept);
  // Logits of `count` rows.
  void score(const Matrix& head, const float* rows, long stride, int count) {
    linear(head, rows, stride, count, logits.row(0), logits.stride);
  }
  void push_window(const Layer& layer, const float* inputs, long stride, int rows);
};
