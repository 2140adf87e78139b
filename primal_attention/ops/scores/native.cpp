// Scores of the cosine map and their gradients, which README.md derives.
//
// A task is some tokens of a sequence and some of its heads. It goes through its tokens a block at a
// time, and through a block head by head: the rows of a head are copied to scratch memory, and the
// products are made from there. Rows of a head lie far apart, and are not fetched in time unless they are
// asked for: each row that is read asks for the same row of the next head.
//
// Sequences are cut into tasks by their length alone, and what tasks sum over the tokens is added up in
// the order of the tokens: results do not depend on the number of threads.
//
// Letters: b sequences, n tokens, G heads (of both sides), P feature dim, S directions.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

// As native.py fills it.
struct Sizes {
  int64_t b, n, G, P, S;
  int64_t z_sequence, z_token;          // elements between sequences, and between tokens, of q and k
  int64_t score_sequence, score_token;  // ... of the scores and of their gradients
  int64_t d_score_sequence, d_score_token;
  int64_t weight_sequence;              // 0 where sequences share their weights
  int64_t mask_sequence;
  int64_t threads;
};

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 8;  // of a register; of a tile of a product, which stays in registers
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 4;
#else
constexpr int kLanes = 4, kRows = 4;
#endif
constexpr int kColumns = 2 * kLanes;  // of a tile
constexpr int64_t kBlock = 16;        // tokens, a multiple of a tile's rows
constexpr int64_t kChunk = 512;       // tokens of a task

template <int L>
struct Vector {
  typedef float Type __attribute__((vector_size(L * sizeof(float))));
};
typedef Vector<kLanes>::Type Lanes;

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }

// As many as there are, at most all; zeros in the place of the others.
inline Lanes load(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  float all[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) all[i] = from[i];
  return load(all);
}

inline void store(float* to, Lanes lanes, int64_t count) {
  if (count >= kLanes) return store(to, lanes);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

inline void increase(float* to, Lanes lanes) { store(to, load(to) + lanes); }

template <int L = kLanes>
inline float sum(typename Vector<L>::Type lanes) {
  if constexpr (L == 2) {
    return lanes[0] + lanes[1];
  } else {
    typename Vector<L / 2>::Type half[2];
    std::memcpy(half, &lanes, sizeof(lanes));
    return sum<L / 2>(half[0] + half[1]);
  }
}

inline void add(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// Asks for the memory of a row that is wanted soon.
template <typename T>
inline void fetch(T* row, int64_t columns) {
  constexpr int kLine = 64 / sizeof(float);
  for (int64_t c = 0; c < columns; c += kLine) __builtin_prefetch(row + c, !std::is_const<T>::value, 2);
}

inline int64_t divided_up(int64_t count, int64_t size) { return (count + size - 1) / size; }
inline int64_t padded(int64_t columns) { return divided_up(columns, kColumns) * kColumns; }

// Scratch memory; rows are padded to whole tiles, with zeros.
struct Room {
  explicit Room(int64_t size) : memory(new float[size]()) {}
  operator float*() const { return memory.get(); }
  std::unique_ptr<float[]> memory;
};

// Hands each row of the tiles of A B, two registers, to use(row, column, left, right). A's elements are
// a_row and a_step apart; columns are padded, and so are the rows that A has in memory.
template <typename Use>
inline void product(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t rows,
                    int64_t depth, int64_t columns, Use use) {
  for (int64_t j = 0; j < columns; j += kColumns) {
    for (int64_t i = 0; i < rows; i += kRows) {
      Lanes left[kRows], right[kRows];
      const float *a_k = a + i * a_row, *b_k = b + j;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) left[r] = right[r] = Lanes{};
      for (int64_t k = 0; k < depth; ++k, a_k += a_step, b_k += b_step) {
        const Lanes b_left = load(b_k), b_right = load(b_k + kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          left[r] += a_k[r * a_row] * b_left;
          right[r] += a_k[r * a_row] * b_right;
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
        if (i + r < rows) use(i + r, j, left[r], right[r]);
    }
  }
}

// What is done at a time, of one head: some tokens, and whether they are real.
struct Block {
  int64_t tokens;
  const uint8_t* mask;  // null where all are real
  bool real(int64_t i) const { return !mask || mask[i]; }
};

// What the tokens of a block have of a head, rows of a larger tensor, and of the head that comes next.
template <typename T>
struct Rows {
  T *here, *next;
  int64_t token;
  T* operator[](int64_t i) const { return here + i * token; }
  T* after(int64_t i) const { return next + i * token; }
};

// Copies queries or keys, and takes their inverse norms; both zero at masked tokens.
inline void take(Block block, Rows<const float> z, int64_t P, float* rows, float* inverse) {
  const float least = std::sqrt(std::numeric_limits<float>::min());
  for (int64_t i = 0; i < block.tokens; ++i, rows += padded(P)) {
    fetch(z.after(i), P);
    Lanes squares = {};
    for (int64_t p = 0; p < P; p += kLanes) {
      const Lanes lanes = block.real(i) ? load(z[i] + p, P - p) : Lanes{};
      squares += lanes * lanes;
      store(rows + p, lanes);
    }
    inverse[i] = sum(squares);
  }
  for (int64_t i = 0; i < block.tokens; ++i) {
    const float norm = std::sqrt(inverse[i]);
    inverse[i] = norm >= least ? 1 / norm : 0;
  }
}

// The gradients of scores, with those by their energies, and the products of both with the scores; all
// times the inverse norms, and zero at masked tokens.
inline void take_gradients(Block block, Rows<const float> scores, Rows<const float> d_scores,
                           const float* twice_d_energies, const float* inverse, int64_t S, float* rows,
                           float* radial) {
  for (int64_t i = 0; i < block.tokens; ++i, rows += padded(S)) {
    fetch(scores.after(i), S);
    fetch(d_scores.after(i), S);
    Lanes products = {};
    for (int64_t s = 0; s < S; s += kLanes) {
      const Lanes score = load(scores[i] + s, S - s);
      const Lanes given = block.real(i) ? load(d_scores[i] + s, S - s) : Lanes{};
      const Lanes d_score = (given + load(twice_d_energies + s) * score) * inverse[i];
      products += score * d_score;
      store(rows + s, d_score);
    }
    radial[i] = sum(products);
  }
}

struct Task {
  int64_t sequence, chunk, head, heads, first, last;  // heads from head on; tokens from first up to last
};

// A tensor [b, n, G, width].
template <typename T>
struct Tensor {
  T* memory;
  int64_t sequence, token, width;  // elements of each
  Rows<T> rows(const Task& task, int64_t first, int64_t h) const {
    T* head = memory + task.sequence * sequence + first * token + task.head * width;
    return {head + h * width, head + (h + 1 < task.heads ? (h + 1) * width : kBlock * token), token};
  }
};

// As few groups of heads as keep the threads busy: neighbours lie on the same pages of the memory.
struct Tasks {
  explicit Tasks(const Sizes& sizes)
      : n(sizes.n),
        G(sizes.G),
        chunks(divided_up(n, kChunk)),
        heads(std::max<int64_t>(1, G / divided_up(sizes.threads, std::max<int64_t>(1, sizes.b * chunks)))),
        groups(divided_up(G, heads)),
        count(sizes.b * chunks * groups) {}
  Task operator[](int64_t task) const {
    const int64_t head = task % groups * heads, chunk = task / groups % chunks, first = chunk * kChunk;
    return {task / groups / chunks, chunk, head, std::min(heads, G - head), first, std::min(n, first + kChunk)};
  }
  int64_t n, G, chunks, heads, groups, count;
};

// Sums over the tokens, [b, G, size]: the first chunk of a sequence adds to the totals, later ones to
// sums of their own, which are added to the totals at the end.
struct Sums {
  Sums(const Tasks& tasks, int64_t b, int64_t size, float* totals)
      : b(b), G(tasks.G), size(size), later(std::max<int64_t>(0, tasks.chunks - 1)), totals(totals),
        parts(b * later * G * size) {}
  float* of(const Task& task) const { return at(task.sequence, task.chunk) + task.head * size; }
  void add_up(int64_t threads) const {
#pragma omp parallel for schedule(static) num_threads(threads) if (later > 0)
    for (int64_t head = 0; head < b * G; ++head)
      for (int64_t chunk = 1; chunk <= later; ++chunk)
        add(totals + head * size, at(head / G, chunk) + head % G * size, size);
  }
  float* at(int64_t sequence, int64_t chunk) const {
    const int64_t row = chunk == 0 ? sequence : sequence * later + chunk - 1;
    return (chunk == 0 ? totals : parts) + row * G * size;
  }
  int64_t b, G, size, later;
  float* totals;
  Room parts;
};

Block block_of(const Task& task, int64_t first, const uint8_t* mask, int64_t mask_sequence) {
  return {std::min(task.last - first, kBlock), mask ? mask + task.sequence * mask_sequence + first : nullptr};
}

}  // namespace

extern "C" {

// Writes the scores [b, n, G, S] of z [b, n, G, P] and adds their squares to the energies [b, G, S].
void write_scores(const Sizes* sizes, const float* z, const float* weights, const uint8_t* mask, float* scores,
                  float* energies) {
  const auto [b, n, G, P, S, z_sequence, z_token, score_sequence, score_token, unused_0, unused_1,
              weight_sequence, mask_sequence, threads] = *sizes;
  const int64_t p_stride = padded(P), s_stride = padded(S);
  const Tensor<const float> given{z, z_sequence, z_token, P};
  const Tensor<float> made{scores, score_sequence, score_token, S};
  const Tasks tasks(*sizes);
  const Sums sums(tasks, b, S, energies);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t each = 0; each < tasks.count; ++each) {
    const Task task = tasks[each];
    const float* w = weights + task.sequence * weight_sequence + task.head * P * S;
    const Room wide(task.heads * P * s_stride), energy(task.heads * s_stride);
    const Room scratch(kBlock * (p_stride + 1));
    float *const rows = scratch, *const inverse = rows + kBlock * p_stride;
    for (int64_t row = 0; row < task.heads * P; ++row) add(wide + row * s_stride, w + row * S, S);  // to zeros
    for (int64_t first = task.first; first < task.last; first += kBlock) {
      const Block block = block_of(task, first, mask, mask_sequence);
      for (int64_t h = 0; h < task.heads; ++h) {
        const Rows<float> to = made.rows(task, first, h);
        float* const squares = energy + h * s_stride;
        take(block, given.rows(task, first, h), P, rows, inverse);
        for (int64_t i = 0; i < block.tokens; ++i) fetch(to.after(i), S);
        product(rows, p_stride, 1, wide + h * P * s_stride, s_stride, block.tokens, P, s_stride,
                [=, S = S](int64_t i, int64_t s, Lanes left, Lanes right) {
                  left *= inverse[i], right *= inverse[i];
                  increase(squares + s, left * left);
                  increase(squares + s + kLanes, right * right);
                  store(to[i] + s, left, S - s);
                  store(to[i] + s + kLanes, right, S - s - kLanes);
                });
      }
    }
    for (int64_t h = 0; h < task.heads; ++h) add(sums.of(task) + h * S, energy + h * s_stride, S);
  }
  sums.add_up(threads);
}

// Writes the gradients d_z [b, n, G, P], side by side, and adds to those of the weights [b, G, S, P].
void write_gradients(const Sizes* sizes, const float* z, const float* weights, const uint8_t* mask,
                     const float* scores, const float* d_scores, const float* d_energies, float* d_z,
                     float* d_weights) {
  const auto [b, n, G, P, S, z_sequence, z_token, score_sequence, score_token, d_score_sequence,
              d_score_token, weight_sequence, mask_sequence, threads] = *sizes;
  const int64_t p_stride = padded(P), s_stride = padded(S);
  const Tensor<const float> given{z, z_sequence, z_token, P}, made{scores, score_sequence, score_token, S};
  const Tensor<const float> d_made{d_scores, d_score_sequence, d_score_token, S};
  const Tensor<float> d_given{d_z, n * G * P, G * P, P};
  const Tasks tasks(*sizes);
  const Sums sums(tasks, b, S * P, d_weights);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t each = 0; each < tasks.count; ++each) {
    const Task task = tasks[each];
    const float* w = weights + task.sequence * weight_sequence + task.head * P * S;
    const Room turned(task.heads * S * p_stride), d_w(task.heads * S * p_stride), twice(task.heads * s_stride);
    const Room scratch(kBlock * (p_stride + s_stride + 2));
    float *const rows = scratch, *const d_rows = rows + kBlock * p_stride;
    float *const inverse = d_rows + kBlock * s_stride, *const radial = inverse + kBlock;
    for (int64_t h = 0; h < task.heads; ++h)
      for (int64_t p = 0; p < P; ++p)
        for (int64_t s = 0; s < S; ++s) turned[(h * S + s) * p_stride + p] = w[(h * P + p) * S + s];
    for (int64_t h = 0; d_energies && h < task.heads; ++h)
      for (int64_t s = 0; s < S; ++s)
        twice[h * s_stride + s] = 2 * d_energies[(task.sequence * G + task.head + h) * S + s];
    for (int64_t first = task.first; first < task.last; first += kBlock) {
      const Block block = block_of(task, first, mask, mask_sequence);
      for (int64_t h = 0; h < task.heads; ++h) {
        const Rows<float> to = d_given.rows(task, first, h);
        float* const total = d_w + h * S * p_stride;
        take(block, given.rows(task, first, h), P, rows, inverse);
        take_gradients(block, made.rows(task, first, h), d_made.rows(task, first, h), twice + h * s_stride, inverse,
                       S, d_rows, radial);
        product(d_rows, 1, s_stride, rows, p_stride, S, block.tokens, p_stride,
                [=](int64_t s, int64_t p, Lanes left, Lanes right) {
                  increase(total + s * p_stride + p, left);
                  increase(total + s * p_stride + p + kLanes, right);
                });
        product(d_rows, s_stride, 1, turned + h * S * p_stride, p_stride, block.tokens, S, p_stride,
                [=, P = P](int64_t i, int64_t p, Lanes left, Lanes right) {
                  const float* const row = rows + i * p_stride + p;
                  left -= radial[i] * (inverse[i] * load(row));
                  right -= radial[i] * (inverse[i] * load(row + kLanes));
                  store(to[i] + p, left, P - p);
                  store(to[i] + p + kLanes, right, P - p - kLanes);
                });
      }
    }
    for (int64_t row = 0; row < task.heads * S; ++row) add(sums.of(task) + row * P, d_w + row * p_stride, P);
  }
  sums.add_up(threads);
}

}  // extern "C"
