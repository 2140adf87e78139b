// Scores of the cosine map and their gradients, which README.md derives.
//
// A task is some heads of a sequence. It copies blocks of tokens into scratch memory that stays in
// the cache, unit rows already, and multiplies there. What a head adds up is added by one task, in
// the order of the tokens, so that results do not depend on the number of threads.
//
// Letters: b sequences, n tokens, G heads (of both sides), P feature dim, S directions.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 8;  // of a register; of a tile of a product, which stays in registers
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 4;
#else
constexpr int kLanes = 4, kRows = 4;
#endif
constexpr int kColumns = 2 * kLanes;  // of a tile
constexpr int64_t kBlock = 16;  // tokens

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

// As memcpy, without a call for so few.
inline void copy(float* to, const float* from, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

int64_t padded(int64_t columns) { return (columns + kColumns - 1) / kColumns * kColumns; }

// Scratch memory; rows are padded to whole tiles, with zeros.
struct Room {
  explicit Room(int64_t size) : memory(new float[size]()) {}
  float* get() { return memory.get(); }
  std::unique_ptr<float[]> memory;
};

// Adds R rows of A B to C; A's elements are a_row and a_column apart.
template <int R>
void add_tile(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t columns,
                     float* c, int64_t depth) {
  Lanes left[R] = {}, right[R] = {};
  for (int64_t k = 0; k < depth; ++k, a += a_column, b += columns) {
    const Lanes b_left = load(b), b_right = load(b + kLanes);
    for (int i = 0; i < R; ++i) {
      left[i] += a[i * a_row] * b_left;
      right[i] += a[i * a_row] * b_right;
    }
  }
  for (int i = 0; i < R; ++i, c += columns) {
    store(c, load(c) + left[i]);
    store(c + kLanes, load(c + kLanes) + right[i]);
  }
}

// C += A B, with B [depth, columns] and C [rows, columns] side by side, columns a multiple of a tile's.
void add_product(const float* a, int64_t a_row, int64_t a_column, const float* b, float* c, int64_t rows,
                 int64_t depth, int64_t columns) {
  for (int64_t j = 0; j < columns; j += kColumns) {
    int64_t i = 0;
    for (; i + kRows <= rows; i += kRows)
      add_tile<kRows>(a + i * a_row, a_row, a_column, b + j, columns, c + i * columns + j, depth);
    for (; i + 4 <= rows; i += 4)
      add_tile<4>(a + i * a_row, a_row, a_column, b + j, columns, c + i * columns + j, depth);
    for (; i < rows; ++i)
      add_tile<1>(a + i * a_row, a_row, a_column, b + j, columns, c + i * columns + j, depth);
  }
}

inline void scale(const float* row, float factor, int64_t stride, float* to) {
  for (int64_t i = 0; i < stride; i += kLanes) store(to + i, load(row + i) * factor);
}

// Some tokens of a sequence and some heads. Memory is read and written token by token, in its order;
// scratch memory has the tokens of a head together, [heads, kBlock, stride].
struct Block {
  int64_t tokens, heads;
  const uint8_t* mask;  // of the tokens; null where all are real
  bool real(int64_t i) const { return !mask || mask[i]; }
};

// Unit rows, and the inverse norms of what they came from; both zero at masked tokens.
void unit_rows(Block block, const float* z, int64_t z_token, int64_t P, int64_t stride, float* phi,
               float* inverse) {
  const float least = std::sqrt(std::numeric_limits<float>::min());
  for (int64_t i = 0; i < block.tokens; ++i) {
    for (int64_t h = 0; h < block.heads; ++h) {
      float *row = phi + (h * kBlock + i) * stride, *factor = inverse + h * kBlock + i;
      if (!block.real(i)) {
        std::memset(row, 0, P * sizeof(float));
        *factor = 0;
        continue;
      }
      copy(row, z + i * z_token + h * P, P);
      Lanes squares = {};
      for (int64_t p = 0; p < stride; p += kLanes) squares += load(row + p) * load(row + p);
      const float norm = std::sqrt(sum(squares));
      *factor = norm >= least ? 1 / norm : 0;
      scale(row, *factor, stride, row);
    }
  }
}

// Gradients of the scores by themselves and by their energies, and the products of both with the
// scores; zero at masked tokens.
void score_gradients(Block block, const float* scores, int64_t token, const float* d_scores, int64_t d_token,
                     const float* twice_d_energies, int64_t S, int64_t stride, float* score, float* d_score,
                     float* radial) {
  for (int64_t i = 0; i < block.tokens; ++i) {
    for (int64_t h = 0; h < block.heads; ++h) {
      float *row = d_score + (h * kBlock + i) * stride, *along = radial + h * kBlock + i;
      if (!block.real(i)) {
        std::memset(row, 0, S * sizeof(float));
        *along = 0;
        continue;
      }
      copy(score, scores + i * token + h * S, S);
      copy(row, d_scores + i * d_token + h * S, S);
      Lanes products = {};
      for (int64_t s = 0; s < stride; s += kLanes) {
        store(row + s, load(row + s) + load(twice_d_energies + h * stride + s) * load(score + s));
        products += load(score + s) * load(row + s);
      }
      *along = sum(products);
    }
  }
}

void add_squares(const float* rows, int64_t count, int64_t stride, float* sums) {
  for (int64_t s = 0; s < stride; s += kLanes) {
    Lanes total = {};
    for (int64_t i = 0; i < count; ++i) total += load(rows + i * stride + s) * load(rows + i * stride + s);
    store(sums + s, load(sums + s) + total);
  }
}

// Tasks of one sequence and some of its heads each: as few groups of heads as keep the threads busy,
// since neighbours lie on the same pages of the memory.
struct Groups {
  struct Task {
    int64_t sequence, head, heads;
  };
  Groups(int64_t b, int64_t G, int64_t threads)
      : G(G), size(std::max<int64_t>(1, G / ((threads + b - 1) / b))), each((G + size - 1) / size), tasks(b * each) {}
  Task operator[](int64_t task) const {
    const int64_t head = task % each * size;
    return {task / each, head, std::min(size, G - head)};
  }
  int64_t G, size, each, tasks;
};

}  // namespace

extern "C" {

struct Sizes {
  int64_t b, n, G, P, S;
  int64_t z_sequence, z_token;            // elements between sequences, and between tokens, of q and k
  int64_t score_sequence, score_token;    // ... of the scores and of their gradients
  int64_t d_score_sequence, d_score_token;
  int64_t weight_sequence;                // 0 where sequences share their weights
  int64_t mask_sequence;
  int64_t threads;
};

// Writes the scores [b, n, G, S] of z [b, n, G, P] and adds their squares to the energies [b, G, S].
void write_scores(const Sizes* sizes, const float* z, const float* weights, const uint8_t* mask, float* scores,
                  float* energies) {
  const auto [b, n, G, P, S, z_sequence, z_token, score_sequence, score_token, unused_0, unused_1,
              weight_sequence, mask_sequence, threads] = *sizes;
  const int64_t p_stride = padded(P), s_stride = padded(S);
  const Groups groups(b, G, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t task = 0; task < groups.tasks; ++task) {
    const auto [sequence, head, heads] = groups[task];
    const float* w = weights + sequence * weight_sequence + head * P * S;
    Room wide(heads * P * s_stride), phi(heads * kBlock * p_stride), inverse(heads * kBlock);
    Room score(heads * kBlock * s_stride), energy(heads * s_stride);
    for (int64_t row = 0; row < heads * P; ++row) copy(wide.get() + row * s_stride, w + row * S, S);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t tokens = std::min(n - first, kBlock);
      const Block block{tokens, heads, mask ? mask + sequence * mask_sequence + first : nullptr};
      unit_rows(block, z + sequence * z_sequence + first * z_token + head * P, z_token, P, p_stride, phi.get(),
                inverse.get());
      for (int64_t h = 0; h < heads; ++h) {
        float* rows = score.get() + h * kBlock * s_stride;
        std::memset(rows, 0, tokens * s_stride * sizeof(float));
        add_product(phi.get() + h * kBlock * p_stride, p_stride, 1, wide.get() + h * P * s_stride, rows, tokens,
                    P, s_stride);
        add_squares(rows, tokens, s_stride, energy.get() + h * s_stride);
      }
      float* out = scores + sequence * score_sequence + first * score_token + head * S;
      for (int64_t i = 0; i < tokens; ++i)
        for (int64_t h = 0; h < heads; ++h)
          copy(out + i * score_token + h * S, score.get() + (h * kBlock + i) * s_stride, S);
    }
    float* sums = energies + (sequence * G + head) * S;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t s = 0; s < S; ++s) sums[h * S + s] += energy.get()[h * s_stride + s];
  }
}

// Writes the gradients d_z [b, n, G, P], side by side, and adds to those of the weights [b, G, S, P].
void write_gradients(const Sizes* sizes, const float* z, const float* weights, const uint8_t* mask,
                     const float* scores, const float* d_scores, const float* d_energies, float* d_z,
                     float* d_weights) {
  const auto [b, n, G, P, S, z_sequence, z_token, score_sequence, score_token, d_score_sequence,
              d_score_token, weight_sequence, mask_sequence, threads] = *sizes;
  const int64_t p_stride = padded(P), s_stride = padded(S);
  const Groups groups(b, G, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t task = 0; task < groups.tasks; ++task) {
    const auto [sequence, head, heads] = groups[task];
    const float* w = weights + sequence * weight_sequence + head * P * S;
    Room turned(heads * S * p_stride), d_w(heads * P * s_stride), twice(heads * s_stride), score(s_stride);
    Room phi(heads * kBlock * p_stride), d_phi(kBlock * p_stride), d_score(heads * kBlock * s_stride);
    Room inverse(heads * kBlock), radial(heads * kBlock);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t p = 0; p < P; ++p)
        for (int64_t s = 0; s < S; ++s) turned.get()[(h * S + s) * p_stride + p] = w[(h * P + p) * S + s];
    for (int64_t h = 0; d_energies && h < heads; ++h)
      for (int64_t s = 0; s < S; ++s)
        twice.get()[h * s_stride + s] = 2 * d_energies[(sequence * G + head + h) * S + s];
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t tokens = std::min(n - first, kBlock);
      const Block block{tokens, heads, mask ? mask + sequence * mask_sequence + first : nullptr};
      unit_rows(block, z + sequence * z_sequence + first * z_token + head * P, z_token, P, p_stride, phi.get(),
                inverse.get());
      score_gradients(block, scores + sequence * score_sequence + first * score_token + head * S, score_token,
                      d_scores + sequence * d_score_sequence + first * d_score_token + head * S, d_score_token,
                      twice.get(), S, s_stride, score.get(), d_score.get(), radial.get());
      for (int64_t h = 0; h < heads; ++h) {
        float *rows = phi.get() + h * kBlock * p_stride, *d_rows = d_score.get() + h * kBlock * s_stride;
        for (int64_t i = 0; i < tokens; ++i)
          scale(rows + i * p_stride, -radial.get()[h * kBlock + i], p_stride, d_phi.get() + i * p_stride);
        add_product(rows, 1, p_stride, d_rows, d_w.get() + h * P * s_stride, P, tokens, s_stride);
        add_product(d_rows, s_stride, 1, turned.get() + h * S * p_stride, d_phi.get(), tokens, S, p_stride);
        for (int64_t i = 0; i < tokens; ++i)  // in the place of the rows, which are spent
          scale(d_phi.get() + i * p_stride, inverse.get()[h * kBlock + i], p_stride, rows + i * p_stride);
      }
      float* out = d_z + ((sequence * n + first) * G + head) * P;
      for (int64_t i = 0; i < tokens; ++i)
        for (int64_t h = 0; h < heads; ++h)
          copy(out + (i * G + h) * P, phi.get() + (h * kBlock + i) * p_stride, P);
    }
    float* sums = d_weights + (sequence * G + head) * S * P;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t p = 0; p < P; ++p)
        for (int64_t s = 0; s < S; ++s) sums[(h * S + s) * P + p] += d_w.get()[(h * P + p) * s_stride + s];
  }
}

}  // extern "C"
