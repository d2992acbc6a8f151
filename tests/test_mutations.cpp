// Faults planted behind the hooks of step_loop.hpp, which the library does not know: the checks that pass on the real
// code catch every one. Checks that cannot fail prove nothing.
#include <algorithm>
#include <cstdint>
#include <doctest/doctest.h>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "step_loop.hpp"

namespace {

using namespace step_loop;

using Step = lookahead::Lookahead<5, 4, 5>;
using Tree = Step::Tree;
using Window = Hooks<Step>::Window;

// A request whose pool is roomy and whose steps have rows to spend, with all that a mutation may spoil.
void check_request(std::uint64_t seed, Hooks<Step>& hooks) {
  Random random(seed);
  OracleOptions options;
  options.seed = seed;
  options.vocabulary = pick(random, std::vector{5, 50, 5000});
  options.repetition = 0.9;
  Loop<Step> loop(options, 1 << 16, hooks);
  loop.roomy = true;
  const Tokens prompt = random_tokens(random, 1 + below(random, 20), options.vocabulary);
  loop.start(prompt, seed, 40);
  const Tokens behind(loop.truth().begin() + length(prompt), loop.truth().end());
  for (int hints = below(random, 3); hints > 0; --hints) {  // of the text to come, not all right
    Tokens hint = behind;
    for (std::size_t i = 0; i < hint.size(); i += 3) hint[i] = below(random, options.vocabulary);
    loop.pool.add_text(hint);
  }
  // The last of several end tokens is the one that comes.
  loop.start(prompt, seed, 40, {options.vocabulary - 1, behind[20 + random() % 10]});
  while (!loop.ended()) {
    const ShapeMode mode = one_in(random, 2) ? ShapeMode::growth : ShapeMode::published;
    loop.step({5, 4, 5, mode, one_in(random, 2)}, loop.limits());
  }
  require(loop.text() == loop.truth(), "the whole text is plain decoding's");
}

struct Fault : Hooks<Step> {
  int planted = 0;
};

constexpr std::uint64_t requests = 400;

// Plants a fault in many requests. A check or the oracle, with a message that contains `text`, must catch it in every
// one in which it took hold; in most where `by_chance`, because the fault may do by chance what is right.
template <class Planted>
void check_caught(const std::string& text, bool by_chance = false) {
  int planted = 0, missed = 0;
  for (std::uint64_t seed = 0; seed < requests; ++seed) {
    CAPTURE(seed);
    Planted fault;
    std::string caught;
    try {
      check_request(seed, fault);
    } catch (const std::logic_error& e) {
      caught = e.what();
    }
    CAPTURE(caught);
    if (fault.planted == 0) REQUIRE(caught.empty());
    planted += static_cast<int>(fault.planted > 0);
    missed += static_cast<int>(fault.planted > 0 && caught.empty());
    if (!caught.empty()) REQUIRE(caught.find(text) != std::string::npos);
  }
  CHECK(planted > 40);
  CHECK(missed <= (by_chance ? planted / 2 : 0));
}

void flip(Tree& tree, int row, int bit) { tree.ancestor[row * Tree::words + bit / 32] ^= 1U << (bit % 32); }

// Spoils a window that has rolled.
struct RollFault : Fault {
  Window before;
  virtual void spoil(Window& now) = 0;
  void harvest(Window& window) override { before = window; }
  void rolled(Window& window) override {
    before.cell[0][0] = window.cell[0][0];
    const Window right = window;
    if (std::ranges::equal(cells(before), cells(right))) return;  // a step without window
    spoil(window);
    planted += static_cast<int>(!std::ranges::equal(cells(window), cells(right)));
  }
  static Tokens cells(const Window& window) {
    Tokens all;
    for (const auto& level : window.cell) all.insert(all.end(), std::begin(level), std::end(level));
    return all;
  }
};

}  // namespace

TEST_CASE("without a fault every request passes") {
  for (std::uint64_t seed = 0; seed < requests; ++seed) {
    CAPTURE(seed);
    Hooks<Step> none;
    REQUIRE_NOTHROW(check_request(seed, none));
  }
}

TEST_CASE("a wrong mask: a row sees another branch") {
  struct Mask : Fault {
    void engine_tree(Tree& tree) override {
      const int last = tree.rows - 1;
      for (int r = last - 1; r > tree.root; --r) {
        if (tree.view().sees(last, r)) continue;
        flip(tree, last, r);
        ++planted;
        return;
      }
    }
  };
  check_caught<Mask>("sees ");
}

TEST_CASE("a wrong mask: a row does not see its parent") {
  struct Mask : Fault {
    void engine_tree(Tree& tree) override {
      const int last = tree.rows - 1;
      if (last <= tree.root) return;
      flip(tree, last, tree.parent[last]);
      ++planted;
    }
  };
  check_caught<Mask>(" misses position ");
}

TEST_CASE("wrong positions: by row, not by depth") {
  struct Positions : Fault {
    void engine_tree(Tree& tree) override {
      for (int r = 0; r < tree.rows; ++r) {
        planted += static_cast<int>(tree.position[r] != tree.context_size + r);
        tree.position[r] = tree.context_size + r;
      }
    }
  };
  check_caught<Positions>(" misses position ");
}

TEST_CASE("wrong order: a child before its parent") {
  struct Order : Fault {
    void engine_tree(Tree& tree) override {
      const int child = tree.rows - 1, parent = child <= tree.root ? -1 : tree.parent[child];
      if (parent <= tree.root) return;
      std::swap(tree.token[child], tree.token[parent]);
      std::swap(tree.depth[child], tree.depth[parent]);
      std::swap(tree.position[child], tree.position[parent]);
      tree.parent[child] = tree.parent[parent];
      tree.parent[parent] = child;
      for (int r = parent + 1; r < child; ++r)
        if (tree.parent[r] == parent) tree.parent[r] = child;
      flip(tree, child, parent);
      flip(tree, parent, child);
      ++planted;
    }
  };
  check_caught<Order>("row ");
}

TEST_CASE("a wrong row is committed: a sibling of the accepted one") {
  struct Row : Fault {
    void commit(const Tree& tree, std::vector<std::int32_t>& path) override {
      for (int r = tree.root + 1; r < tree.rows && length(path) > tree.root + 1; ++r) {
        if (r == path.back() || tree.parent[r] != tree.parent[path.back()]) continue;
        path.back() = r;
        ++planted;
        return;
      }
    }
  };
  check_caught<Row>("context + pending chain == text: context");
}

TEST_CASE("a wrong row is committed: the first rows instead of the path") {
  struct Row : Fault {
    void commit(const Tree& tree, std::vector<std::int32_t>& path) override {
      for (int i = tree.root + 1; i < length(path); ++i) {
        planted += static_cast<int>(path[at(i)] != i);
        path[at(i)] = i;
      }
    }
  };
  check_caught<Row>("");
}

TEST_CASE("a wrong bonus rule: none behind a guess that matched to its end") {
  struct Bonus : Fault {
    Proposal<Token> walked(Step& step, const Tree& tree, const Proposal<Token>& p) override {
      for (int r = tree.root + 1; r < tree.rows; ++r)
        if (tree.parent[r] == p.path.back()) return p;
      if (p.tokens.size() < 2) return p;
      ++planted;
      return step.accept(p.tokens.size() - 1);
    }
  };
  check_caught<Bonus>("the last token included");
}

TEST_CASE("a wrong bonus rule: the draft's token instead of the model's") {
  struct Bonus : Fault {
    Proposal<Token> walked(Step&, const Tree& tree, const Proposal<Token>& p) override {
      for (int r = tree.root + 1; r < tree.rows && !p.stopped; ++r) {
        if (tree.parent[r] != p.path.back()) continue;
        const_cast<Token&>(p.tokens.back()) = tree.token[r];
        ++planted;
        break;
      }
      return p;
    }
  };
  check_caught<Bonus>("the last token included");
}

TEST_CASE("a wrong key: column 0's n-gram is filed under the root before") {
  struct Key : Fault {
    Token before = -1;
    void harvest(Window& window) override {
      if (before >= 0 && before != window.cell[0][0] && window.ripe(0)) {
        std::swap(before, window.cell[0][0]);
        ++planted;
      } else {
        before = window.cell[0][0];
      }
    }
  };
  check_caught<Key>("filed under its own tokens", true);
}

TEST_CASE("a wrong roll: the new level is dropped and the old one stays") {
  struct Roll : RollFault {
    void spoil(Window& now) override {
      std::ranges::copy(before.cell[Window::levels - 1], now.cell[Window::levels - 1]);
    }
  };
  check_caught<Roll>("the window rolls by one level");
}

TEST_CASE("a wrong roll: the new level 0 keeps its first token, and loses its last one") {
  struct Roll : RollFault {
    void spoil(Window& now) override { std::copy(before.cell[1], before.cell[1] + Window::width - 1, now.cell[0] + 1); }
  };
  check_caught<Roll>("the window rolls by one level");
}

TEST_CASE("a wrong roll: it slides one column too far") {
  struct Roll : RollFault {
    void spoil(Window& now) override {
      for (auto& level : now.cell) std::copy(std::begin(level) + 1, std::end(level), std::begin(level));
      now.cell[0][0] = before.cell[0][0];
    }
  };
  check_caught<Roll>("the window rolls by one level");
}

TEST_CASE("a wrong stop rule: only the first end token is known") {
  struct Stop : Fault {
    bool stop(Token t, const Tokens& ends) override {
      planted += static_cast<int>(contains(ends, t) && t != ends[0]);
      return !ends.empty() && t == ends[0];
    }
  };
  check_caught<Stop>("");
}

TEST_CASE("a wrong stop rule: the last token of a block alone is looked at") {
  struct Stop : Fault {
    bool ends_here = false;
    bool stop(Token t, const Tokens& ends) override {
      planted += static_cast<int>(ends_here);  // and the walk has gone on
      ends_here = contains(ends, t);
      return false;
    }
    Proposal<Token> walked(Step&, const Tree&, const Proposal<Token>& p) override {
      return {p.path, p.tokens, std::exchange(ends_here, false)};
    }
  };
  check_caught<Stop>("the last token included");
}

namespace {

// The pool's rule: a full set gives up its oldest entry, and what is filed again counts as new.
template <class Tile>
void check_eviction() {
  Pool pool(32);
  const auto set = pool.ref();
  const auto context = [](int i) {
    lookahead::ContextHash hash;
    hash.push(static_cast<std::uint32_t>(i));
    return hash.value();
  };
  Random random(1);
  std::vector<int> newest;
  for (std::uint32_t stamp = 1; stamp < 2000; ++stamp) {
    const int i = below(random, 48);
    set.insert(Tile{}, {context(i), Source::text, 1, {static_cast<std::uint32_t>(i)}}, stamp);
    std::erase(newest, i);
    newest.push_back(i);
    if (newest.size() > 32) newest.erase(newest.begin());
    for (int k = 0; k < 48; ++k) {
      const Token token = k;
      require(filed(pool, Source::text, std::span(&token, 1), token) == (std::ranges::find(newest, k) != newest.end()),
              "the 32 newest entries are there, and no other");
    }
  }
}

struct EvictsNewest : lookahead::SerialTile {
  [[nodiscard]] int oldest(const std::uint32_t* stamps) const {
    return static_cast<int>(std::max_element(stamps, stamps + 32) - stamps);
  }
};

struct EvictsFirst : lookahead::SerialTile {
  [[nodiscard]] static int oldest(const std::uint32_t*) { return 0; }
};

struct FilesTwice : lookahead::SerialTile {  // an equal entry is not found
  [[nodiscard]] static std::uint32_t match(const std::uint32_t*, std::uint32_t, std::uint32_t) { return 0; }
};

}  // namespace

TEST_CASE("a wrong eviction from the pool") {
  CHECK_NOTHROW(check_eviction<lookahead::SerialTile>());
  CHECK_THROWS_AS(check_eviction<EvictsNewest>(), CheckFailed);
  CHECK_THROWS_AS(check_eviction<EvictsFirst>(), CheckFailed);
  CHECK_THROWS_AS(check_eviction<FilesTwice>(), CheckFailed);
}
