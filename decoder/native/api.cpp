// The C functions that library.py calls.
#include <new>

#include "engine.h"

#define API extern "C" __attribute__((visibility("default")))

// Null where memory is short. The model's pointers must outlive the engine.
API Engine* kernarc_create(const Model* model) {
  try {
    return new Engine(*model);
  } catch (const std::exception&) {
    return nullptr;
  }
}

API void kernarc_destroy(Engine* engine) { delete engine; }

// State memory of one layer (the MTP layer comes after the last); it may move between calls as a cache grows.
API void kernarc_bind(Engine* engine, int index, float* first, float* second, int64_t capacity) {
  const bool is_mtp = index == static_cast<int>(engine->layers.size());
  Layer& layer = is_mtp ? engine->mtp_layer : engine->layers[index];
  layer.first = first;
  layer.second = second;
  layer.capacity = capacity;
}

// Whether drafts are faster from halves here, and where the MTP layer's halves lie.
API int kernarc_reads_halves() { return READS_HALVES; }

API void kernarc_bind_halves(Engine* engine, uint16_t* keys, uint16_t* values) {
  engine->mtp_layer.half_keys = keys;
  engine->mtp_layer.half_values = values;
}

API void kernarc_reset(Engine* engine, int64_t mtp_origin) { engine->reset(mtp_origin); }

API void kernarc_prefill(Engine* engine, const int64_t* ids, int rows, int64_t start, int skipped, int following) {
  engine->prefill(ids, rows, start, skipped, following);
}

API int64_t kernarc_first_token(Engine* engine, int last_row) { return engine->first_token(last_row); }

API void kernarc_draft(Engine* engine, int count, int64_t* drafts) { engine->draft(count, drafts); }

API int kernarc_step(Engine* engine, const int64_t* drafts, int count, int64_t* tokens) {
  return engine->step(drafts, count, tokens);
}

API void kernarc_read_backlog(Engine* engine, int finish) { engine->read_backlog(finish); }

API int kernarc_backlog_rows(const Engine* engine) { return engine->backlog_rows; }

API int kernarc_max_rows() { return MAX_ROWS; }

// Sizes of the structures, so that the caller can see that both sides mean the same.
API void kernarc_sizes(int64_t* sizes) {
  sizes[0] = sizeof(Matrix);
  sizes[1] = sizeof(Layer);
  sizes[2] = sizeof(Model);
}

// For tests: rows [rows, hidden] after the final norm and logits [rows, vocab] of the last forward.
API void kernarc_last_rows(const Engine* engine, int rows, float* hidden, float* logits) {
  for (int r = 0; r < rows; ++r) {
    std::memcpy(hidden + static_cast<long>(r) * engine->m.hidden, engine->hidden.row(r), engine->m.hidden * sizeof(float));
    if (logits)
      std::memcpy(logits + static_cast<long>(r) * engine->m.vocab, engine->logits.row(r), engine->m.vocab * sizeof(float));
  }
}

// For tests: e^x, 2^x (x <= 0) and log(1 + e^x) of n values.
API void kernarc_exp(const float* x, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(to + i, exp(load(x + i, n - i)), n - i);
}

API void kernarc_exp2(const float* x, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(to + i, exp2_of_negative(load(x + i, n - i)), n - i);
}

API void kernarc_softplus(const float* x, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(to + i, softplus(load(x + i, n - i)), n - i);
}
