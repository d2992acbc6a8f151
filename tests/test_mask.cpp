#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "lookahead/mask.hpp"

using namespace lookahead;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr int max_rows = 200;
using Storage = TokenTreeStorage<std::int32_t, max_rows>;
using Rng = std::mt19937;

int below(Rng& rng, int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); }

/// A tree of 1 to 200 rows, some of them pending, on top of 0 to 100 cached tokens; from bushy to a single chain.
void random_tree(Rng& rng, Storage& tree) {
  const int rows = 1 + below(rng, below(rng, 4) == 0 ? max_rows : 12);
  const int pending = 1 + below(rng, below(rng, 2) == 0 ? 1 : std::min(rows, 8));
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(pending), 7);
  tree.begin(below(rng, 3) == 0 ? 0 : below(rng, 101), tokens.data(), pending);
  const int reach = 1 + below(rng, below(rng, 2) == 0 ? 3 : max_rows);
  while (tree.rows < rows) {
    const int candidates = std::min(reach, tree.rows - tree.root);
    tree.add(tree.rows - 1 - below(rng, candidates), tree.rows);
  }
}

using Matrix = std::vector<std::vector<char>>;

/// The definition: the context, the ancestors found by walking the parents, and the row itself; padding sees itself.
Matrix definition(const TokenTree<>& tree, std::size_t context, std::size_t rows) {
  Matrix sees(rows, std::vector<char>(context + rows, 0));
  for (std::size_t row = 0; row < rows; ++row) {
    sees[row][context + row] = 1;
    if (row >= tree.tokens().size()) continue;
    for (std::size_t c = 0; c < context; ++c) sees[row][c] = 1;
    for (auto r = tree.parents()[row]; r >= 0; r = tree.parents()[static_cast<std::size_t>(r)])
      sees[row][context + static_cast<std::size_t>(r)] = 1;
  }
  return sees;
}

template <class T>
bool bit(const std::vector<T>& packed, std::size_t i) {
  constexpr std::size_t width = std::numeric_limits<T>::digits;
  return (packed[i / width] >> (i % width) & 1U) != 0;
}

/// A buffer full of rubbish with a few elements more than an export needs.
template <class T>
std::vector<T> dirty(std::size_t size) {
  return std::vector<T>(size + 3, static_cast<T>(0x5A));
}

template <class T>
bool tail_untouched(const std::vector<T>& buffer, std::size_t size) {
  return std::all_of(buffer.begin() + static_cast<std::ptrdiff_t>(size), buffer.end(),
                     [](const T& x) { return x == static_cast<T>(0x5A); });
}

/// The text of the InvalidArgument that `f` throws; empty if it throws none.
template <class F>
std::string refusal(F f) {
  try {
    f();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Runs `f(tree, rng)` on many random trees.
template <class F>
void for_random_trees(int count, F f) {
  Storage tree;
  for (int seed = 0; seed < count; ++seed) {
    CAPTURE(seed);
    Rng rng(static_cast<unsigned>(seed));
    random_tree(rng, tree);
    f(tree.view(), rng);
  }
}

}  // namespace

TEST_CASE("dense masks equal the definition") {
  static bool bool_buffer[(max_rows + 40) * (max_rows + 140)];  // vector<bool> is no array
  int wide = 0, padded = 0, deep_context = 0, pending = 0;
  for_random_trees(3000, [&](const TokenTree<>& tree, Rng& rng) {
    const auto columns = below(rng, 2) == 0 ? MaskColumns::tree : MaskColumns::context_and_tree;
    const int padding = below(rng, 2) == 0 ? 0 : below(rng, 40);
    const TreeMask mask(tree, columns, tree.size() + padding);
    const std::size_t context = columns == MaskColumns::tree ? 0 : static_cast<std::size_t>(tree.context_size());
    const std::size_t rows = static_cast<std::size_t>(tree.size() + padding), cols = context + rows;
    wide += rows > 32, padded += padding > 0, deep_context += context > 0, pending += tree.root() > 0;
    REQUIRE(mask.rows() == rows);
    REQUIRE(mask.columns() == cols);

    const std::size_t row_words = (cols + 31) / 32;
    REQUIRE(mask.words() == rows * row_words);
    REQUIRE(mask.bytes() == (rows * cols + 7) / 8);
    REQUIRE(mask.cells() == rows * cols);
    auto words = dirty<std::uint32_t>(mask.words());
    auto bytes = dirty<std::uint8_t>(mask.bytes());
    auto integers = dirty<std::uint8_t>(mask.cells());
    auto bias = dirty<float>(mask.cells());
    const std::span bools(bool_buffer, mask.cells());
    mask.write_words(words);
    mask.write_bytes(bytes);
    mask.write_cells<std::uint8_t>(integers, 1, 0);
    mask.write_cells<float>(bias, 0, -std::numeric_limits<float>::infinity());
    mask.write_cells<bool>(bools, true, false);

    const Matrix sees = definition(tree, context, rows);
    int wrong_words = 0, wrong_bytes = 0, wrong_integers = 0, wrong_bias = 0, wrong_bools = 0;
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t c = 0; c < 32 * row_words; ++c)
        wrong_words += bit(words, r * 32 * row_words + c) != (c < cols && sees[r][c] != 0);
      for (std::size_t c = 0; c < cols; ++c) {
        const bool seen = sees[r][c] != 0;
        wrong_bytes += bit(bytes, r * cols + c) != seen;
        wrong_integers += integers[r * cols + c] != (seen ? 1 : 0);
        wrong_bias += seen ? bias[r * cols + c] != 0 : !(std::isinf(bias[r * cols + c]) && bias[r * cols + c] < 0);
        wrong_bools += bools[r * cols + c] != seen;
      }
    }
    for (std::size_t i = rows * cols; i < 8 * mask.bytes(); ++i) wrong_bytes += bit(bytes, i);
    CHECK(wrong_words == 0);
    CHECK(wrong_bytes == 0);
    CHECK(wrong_integers == 0);
    CHECK(wrong_bias == 0);
    CHECK(wrong_bools == 0);
    CHECK(tail_untouched(words, mask.words()));
    CHECK(tail_untouched(bytes, mask.bytes()));
    CHECK(tail_untouched(integers, mask.cells()));
    CHECK(tail_untouched(bias, mask.cells()));
  });
  // The cases that break masks most often did occur.
  CHECK(wide > 300);
  CHECK(padded > 300);
  CHECK(deep_context > 300);
  CHECK(pending > 300);
}

TEST_CASE("a mask without a row count has no padding") {
  Storage tree;
  const std::int32_t pending[] = {1, 2};
  tree.begin(3, pending, 2);
  tree.add(1, 5);
  CHECK(TreeMask(tree.view(), MaskColumns::tree).columns() == 3);
  CHECK(TreeMask(tree.view(), MaskColumns::context_and_tree).columns() == 6);
  CHECK(TreeMask(tree.view(), MaskColumns::context_and_tree).rows() == 3);
}

TEST_CASE("the layout of a small tree, written out") {
  // Two cached tokens; 0 <- 1, 1 <- {2, 3}; one padding row.
  Storage tree;
  const std::int32_t pending[] = {10};
  tree.begin(2, pending, 1);
  tree.add(0, 11);
  tree.add(1, 12);
  tree.add(1, 13);
  const TokenTree<> view = tree.view();

  std::vector<std::uint32_t> words(5);
  TreeMask(view, MaskColumns::tree, 5).write_words(words);
  CHECK(words == std::vector<std::uint32_t>{0b00001, 0b00011, 0b00111, 0b01011, 0b10000});

  // 4 x 6 cells without a gap: 111000 111100 111110 111101, lowest bit first.
  std::vector<std::uint8_t> bytes(3);
  TreeMask(view, MaskColumns::context_and_tree).write_bytes(bytes);
  CHECK(bytes == std::vector<std::uint8_t>{0b11'000111, 0b1111'0011, 0b101111'01});

  std::vector<Interval> order(4), ids(4);
  depth_first_intervals(view, order);
  CHECK(order == std::vector<Interval>{{0, 4}, {1, 4}, {2, 3}, {3, 4}});
  CHECK(sequence_ids(view, 2, ids) == 2);
  CHECK(ids == std::vector<Interval>{{0, 2}, {0, 2}, {0, 1}, {1, 2}});

  std::vector<std::int32_t> child(4), sibling(4);
  child_links(view, child, sibling);
  CHECK(child == std::vector<std::int32_t>{1, 2, -1, -1});
  CHECK(sibling == std::vector<std::int32_t>{-1, -1, 3, -1});
}

TEST_CASE("the masks of a batch lie behind each other") {
  for (unsigned seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Rng rng(seed);
    std::vector<Storage> trees(static_cast<std::size_t>(below(rng, 6)));
    std::vector<TreeMask<>> masks;
    std::size_t total = 0;
    for (Storage& tree : trees) {
      random_tree(rng, tree);
      masks.emplace_back(tree.view(), MaskColumns::context_and_tree, tree.rows + below(rng, 3));
      total += masks.back().bytes();
    }
    auto bytes = dirty<std::uint8_t>(total);
    auto indptr = dirty<std::int32_t>(masks.size() + 1);
    TreeMask<>::write_bytes(masks, bytes, indptr);
    CHECK(tail_untouched(bytes, total));
    CHECK(tail_untouched(indptr, masks.size() + 1));
    CHECK(indptr[0] == 0);
    for (std::size_t i = 0; i < masks.size(); ++i) {
      std::vector<std::uint8_t> alone(masks[i].bytes());
      masks[i].write_bytes(alone);
      REQUIRE(indptr[i + 1] - indptr[i] == static_cast<std::int32_t>(alone.size()));
      CHECK(std::equal(alone.begin(), alone.end(), bytes.begin() + indptr[i]));
    }
  }
}

TEST_CASE("buffers and limits that are too small are refused, and nothing is written") {
  for_random_trees(100, [](const TokenTree<>& tree, Rng&) {
    const TreeMask mask(tree, MaskColumns::context_and_tree, tree.size() + 1);
    const auto rows = static_cast<std::size_t>(tree.size());
    std::vector<std::uint32_t> words(mask.words() - 1, 9);
    std::vector<std::uint8_t> bytes(mask.bytes() - 1, 9), all(mask.bytes(), 9);
    std::vector<float> cells(mask.cells() - 1, 9);
    std::vector<std::int32_t> indptr(1, 9), small(rows - 1, 9), links(rows, 9), two(2, 9);
    const Interval nine{9, 9};
    std::vector<Interval> intervals(rows - 1, nine), ids(rows, nine);
    const auto says = [](std::size_t holds, std::size_t needs) {
      return "buffer holds " + std::to_string(holds) + " elements, but the export writes " + std::to_string(needs) +
             ":";
    };
    const auto refuses = [&](auto f, std::size_t holds, std::size_t needs) {
      CHECK(contains(refusal(f), says(holds, needs)));
    };
    refuses([&] { mask.write_words(words); }, words.size(), mask.words());
    refuses([&] { mask.write_bytes(bytes); }, bytes.size(), mask.bytes());
    refuses([&] { mask.write_cells<float>(cells, 0, 1); }, cells.size(), mask.cells());
    refuses([&] { TreeMask<>::write_bytes({&mask, 1}, bytes, two); }, bytes.size(), mask.bytes());
    refuses([&] { TreeMask<>::write_bytes({&mask, 1}, all, indptr); }, 1, 2);
    refuses([&] { TreeMask<>::write_bytes({}, all, {}); }, 0, 1);
    refuses([&] { depth_first_intervals(tree, intervals); }, rows - 1, rows);
    refuses([&] { sequence_ids(tree, 1000, intervals); }, rows - 1, rows);
    refuses([&] { child_links(tree, small, links); }, rows - 1, rows);
    refuses([&] { child_links(tree, links, small); }, rows - 1, rows);
    const int leaves = leaf_count(tree);
    CHECK(refusal([&] { sequence_ids(tree, leaves - 1, ids); }) ==
          "the tree has " + std::to_string(leaves) + " leaves and needs a sequence id for each, but " +
              std::to_string(leaves - 1) + " are allowed: allow more ids or plan fewer rows");
    CHECK(refusal([&] { TreeMask(tree, MaskColumns::tree, tree.size() - 1); }) ==
          "a mask of " + std::to_string(rows - 1) + " rows cannot hold a tree of " + std::to_string(rows) +
              " rows: pass a row count of at least that");
    const auto untouched = [](const auto& buffer, const auto& nine_) {
      return std::all_of(buffer.begin(), buffer.end(), [&](const auto& x) { return x == nine_; });
    };
    CHECK(untouched(words, 9U));
    CHECK(untouched(bytes, 9));
    CHECK(untouched(all, 9));
    CHECK(untouched(cells, 9.0F));
    CHECK(untouched(indptr, 9));
    CHECK(untouched(two, 9));
    CHECK(untouched(small, 9));
    CHECK(untouched(links, 9));
    CHECK(untouched(intervals, nine));
    CHECK(untouched(ids, nine));
  });
}

TEST_CASE("a batch beyond 32-bit offsets is refused") {
  Storage tree;
  const std::int32_t pending[] = {1, 2, 3, 4, 5, 6, 7, 8};
  tree.begin(1 << 30, pending, 8);
  const std::vector<TreeMask<>> masks(2, TreeMask(tree.view(), MaskColumns::context_and_tree));
  std::vector<std::int32_t> indptr(3);
  CHECK(contains(refusal([&] { TreeMask<>::write_bytes(masks, {}, indptr); }),
                 "take 2147483664 bytes, but 32-bit offsets reach 2147483647: split the batch"));
}

TEST_CASE("the empty tree has empty exports") {
  Storage tree;
  tree.begin(5, nullptr, 0);
  const TokenTree<> view = tree.view();
  const TreeMask mask(view, MaskColumns::context_and_tree);
  CHECK(mask.rows() == 0);
  CHECK(mask.words() == 0);
  CHECK(mask.bytes() == 0);
  CHECK(mask.cells() == 0);
  mask.write_words({});
  mask.write_bytes({});
  mask.write_cells<float>({}, 0, 1);
  depth_first_intervals(view, {});
  child_links(view, {}, {});
  CHECK(sequence_ids(view, 0, {}) == 0);
  CHECK(is_chain(view));

  std::vector<std::uint32_t> words(2);
  TreeMask(view, MaskColumns::tree, 2).write_words(words);
  CHECK(words == std::vector<std::uint32_t>{0b01, 0b10});
}

TEST_CASE("depth-first intervals tell who sees whom, and number the rows 0, 1, 2, ...") {
  for_random_trees(2000, [](const TokenTree<>& tree, Rng&) {
    const auto rows = static_cast<std::size_t>(tree.size());
    auto order = std::vector<Interval>(rows + 1, {-5, -5});
    depth_first_intervals(tree, order);
    CHECK(order.back() == Interval{-5, -5});
    const Matrix sees = definition(tree, 0, rows);
    int wrong = 0;
    std::vector<int> taken(rows, 0);
    for (std::size_t r = 0; r < rows; ++r) {
      REQUIRE(order[r].first >= 0);
      REQUIRE(order[r].first < tree.size());
      ++taken[static_cast<std::size_t>(order[r].first)];
      for (std::size_t c = 0; c < rows; ++c)
        wrong += (order[c].first <= order[r].first && order[r].first < order[c].end) != (sees[r][c] != 0);
    }
    CHECK(wrong == 0);
    CHECK(std::count(taken.begin(), taken.end(), 1) == tree.size());
  });
}

TEST_CASE("child links reach the children of each row in row order") {
  for_random_trees(2000, [](const TokenTree<>& tree, Rng&) {
    const auto rows = static_cast<std::size_t>(tree.size());
    auto child = dirty<std::int32_t>(rows), sibling = dirty<std::int32_t>(rows);
    child_links(tree, child, sibling);
    CHECK(tail_untouched(child, rows));
    CHECK(tail_untouched(sibling, rows));
    CHECK(sibling[0] == -1);
    for (std::size_t r = 0; r < rows; ++r) {
      std::vector<std::int32_t> expected, found;
      for (std::size_t c = 0; c < rows; ++c)
        if (tree.parents()[c] == static_cast<std::int32_t>(r)) expected.push_back(static_cast<std::int32_t>(c));
      for (auto c = child[r]; c >= 0 && found.size() < rows; c = sibling[static_cast<std::size_t>(c)])
        found.push_back(c);
      REQUIRE(found == expected);
    }
  });
}

TEST_CASE("sequence ids: a row sees a cell exactly if the cell carries its own id and lies not behind it") {
  for_random_trees(2000, [](const TokenTree<>& tree, Rng&) {
    const auto rows = static_cast<std::size_t>(tree.size()), context = static_cast<std::size_t>(tree.context_size());
    auto ids = std::vector<Interval>(rows + 1, {-5, -5});
    const int used = sequence_ids(tree, max_rows, ids);
    CHECK(ids.back() == Interval{-5, -5});

    // One id a leaf, and each row carries those of the leaves below it.
    const Matrix sees = definition(tree, 0, rows);
    std::vector<std::size_t> leaves;
    for (std::size_t r = 0; r < rows; ++r)
      if (std::count(tree.parents().begin(), tree.parents().end(), static_cast<std::int32_t>(r)) == 0)
        leaves.push_back(r);
    REQUIRE(used == static_cast<int>(leaves.size()));
    REQUIRE(used == leaf_count(tree));
    CHECK(sequence_ids(tree, used, ids) == used);
    int wrong = 0;
    for (std::size_t r = 0; r < rows; ++r) {
      REQUIRE(ids[r].first < ids[r].end);
      int below_row = 0;
      for (const std::size_t leaf : leaves) {
        wrong += ids[leaf].end - ids[leaf].first != 1;
        below_row += sees[leaf][r] != 0;
        wrong += (sees[leaf][r] != 0) != (ids[r].first <= ids[leaf].first && ids[leaf].first < ids[r].end);
      }
      wrong += below_row != ids[r].end - ids[r].first;
    }
    CHECK(wrong == 0);

    // The cache: the context carries every id.
    std::vector<Interval> cell_ids(context, Interval{0, used});
    std::vector<std::int32_t> cell_positions;
    for (std::size_t c = 0; c < context; ++c) cell_positions.push_back(static_cast<std::int32_t>(c));
    cell_ids.insert(cell_ids.end(), ids.begin(), ids.begin() + tree.size());
    cell_positions.insert(cell_positions.end(), tree.positions().begin(), tree.positions().end());
    const Matrix expected = definition(tree, context, rows);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t c = 0; c < cell_ids.size(); ++c) {
        const bool carries = cell_ids[c].first <= ids[r].first && ids[r].first < cell_ids[c].end;
        wrong += (carries && cell_positions[c] <= tree.positions()[r]) != (expected[r][c] != 0);
      }
    CHECK(wrong == 0);

    // Each id's positions start behind the context and have no gap, in batch order.
    std::vector<std::int32_t> next(static_cast<std::size_t>(used), tree.context_size());
    for (std::size_t r = 0; r < rows; ++r)
      for (auto id = ids[r].first; id < ids[r].end; ++id)
        wrong += next[static_cast<std::size_t>(id)]++ != tree.positions()[r];
    CHECK(wrong == 0);
  });
}

TEST_CASE("a tree is a chain exactly if its mask is the causal one") {
  int chains = 0, others = 0;
  for_random_trees(2000, [&](const TokenTree<>& tree, Rng&) {
    const auto rows = static_cast<std::size_t>(tree.size());
    const Matrix sees = definition(tree, 0, rows);
    bool causal = true;
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t c = 0; c < rows; ++c) causal = causal && (sees[r][c] != 0) == (c <= r);
    CHECK(is_chain(tree) == causal);
    ++(causal ? chains : others);
  });
  CHECK(chains > 100);
  CHECK(others > 100);
}

namespace {

constexpr std::size_t width = 8;
using Vector = std::vector<double>;

struct Attention {
  Vector out;
  double log_sum_exp;
};

/// One query over the keys and values [first, last), with an additive mask.
Attention attend(const Vector& query, const std::vector<Vector>& keys, const std::vector<Vector>& values,
                 const double* bias) {
  Vector scores(keys.size());
  double top = -infinity;
  for (std::size_t k = 0; k < keys.size(); ++k) {
    scores[k] = bias[k];
    for (std::size_t i = 0; i < width; ++i) scores[k] += query[i] * keys[k][i];
    top = std::max(top, scores[k]);
  }
  Attention result{Vector(width, 0.0), -infinity};
  double sum = 0;
  for (std::size_t k = 0; k < keys.size(); ++k) {
    const double weight = std::exp(scores[k] - top);
    sum += weight;
    for (std::size_t i = 0; i < width; ++i) result.out[i] += weight * values[k][i];
  }
  if (keys.empty()) return result;
  for (double& x : result.out) x /= sum;
  result.log_sum_exp = top + std::log(sum);
  return result;
}

}  // namespace

TEST_CASE("a pass over the context and a masked pass over the tree merge into one masked attention") {
  double largest = 0;
  for_random_trees(400, [&](const TokenTree<>& tree, Rng& rng) {
    const auto rows = static_cast<std::size_t>(tree.size()), context = static_cast<std::size_t>(tree.context_size());
    const auto random = [&] {
      Vector v(width);
      for (double& x : v) x = (below(rng, 2001) - 1000) / 500.0;
      return v;
    };
    std::vector<Vector> keys, values, queries;
    for (std::size_t k = 0; k < context + rows; ++k) keys.push_back(random()), values.push_back(random());
    for (std::size_t r = 0; r < rows; ++r) queries.push_back(random());
    const auto split = static_cast<std::ptrdiff_t>(context);
    const std::vector<Vector> context_keys(keys.begin(), keys.begin() + split),
        tree_keys(keys.begin() + split, keys.end()), context_values(values.begin(), values.begin() + split),
        tree_values(values.begin() + split, values.end());

    const TreeMask whole(tree, MaskColumns::context_and_tree), block(tree, MaskColumns::tree);
    Vector whole_bias(whole.cells()), block_bias(block.cells());
    const Vector no_bias(context, 0.0);
    whole.write_cells<double>(whole_bias, 0, -infinity);
    block.write_cells<double>(block_bias, 0, -infinity);
    for (std::size_t r = 0; r < rows; ++r) {
      const Attention one = attend(queries[r], keys, values, &whole_bias[r * whole.columns()]);
      const Attention a = attend(queries[r], context_keys, context_values, no_bias.data());
      const Attention b = attend(queries[r], tree_keys, tree_values, &block_bias[r * block.columns()]);
      const double top = std::max(a.log_sum_exp, b.log_sum_exp);
      const double u = std::exp(a.log_sum_exp - top), v = std::exp(b.log_sum_exp - top);
      for (std::size_t i = 0; i < width; ++i)
        largest = std::max(largest, std::abs((u * a.out[i] + v * b.out[i]) / (u + v) - one.out[i]));
      largest = std::max(largest, std::abs(top + std::log(u + v) - one.log_sum_exp));
    }
  });
  CHECK(largest < 1e-12);
  MESSAGE("largest difference: " << largest);
}
