/// The bundled model, decoded by a batch that groups of host threads run: the same text as the host classes write.

#include <cstdint>
#include <doctest/doctest.h>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "batch_cases.hpp"
#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "thread_group.hpp"

#include "lookahead/decoder.hpp"

using namespace batch_cases;
using lookahead::engines::GgufFile;
using lookahead::engines::LlamaEngine;
using lookahead::engines::Tokenizer;

TEST_CASE("the device state driven by ThreadGroup decodes the bundled model to the same text as the host classes") {
  constexpr int length = 48;
  const GgufFile file("examples/models/cpython-6m-q8_0.gguf");
  const Tokenizer tokenizer(file);
  const std::vector<std::string> prompts = {"def mean(data):\n", "class Queue:\n    def __init__(self",
                                            "for line in open(path):\n    "};

  const auto count = static_cast<int>(prompts.size());
  for (const MaskLayout layout : {MaskLayout::words, MaskLayout::bits}) {
    Memory<15, 5, 15> memory({.sequences = count, .rows = 24, .mask_layout = layout});
    const auto& b = memory.batch;
    const auto scratch = std::make_unique<lookahead::detail::StepScratch<15, 5, 15, Token>>();
    lookahead::detail::PackScratch pack;
    const auto run = [](auto f) { threads::run(2, false, f); };

    std::vector<LlamaEngine> engines;
    std::vector<ResultCursor> cursors;
    for (int i = 0; i < count; ++i) {
      const Tokens prompt = tokenizer.encode(prompts[at(i)], tokenizer.add_bos());
      engines.emplace_back(file, lookahead::engines::LlamaOptions{.context = 256, .threads = 1});
      engines.back().prefill(std::span(prompt).first(prompt.size() - 1));
      SequenceOptions<Token> options;
      options.limits.tokens_left = length;
      if (layout == MaskLayout::bits) options.shape = {4, 3, 6, ShapeMode::published};
      run([&](const auto& g) {
        lookahead::detail::attach(g, b, i, prompt.data(), static_cast<int>(prompt.size()), options,
                                  static_cast<std::uint32_t>(i + 1), *scratch);
      });
      cursors.push_back({i, static_cast<std::uint32_t>(i + 1), 0});
    }

    std::vector<Tokens> texts(at(count));
    int steps = 0;
    for (bool all_ended = false; !all_ended && steps < length; ++steps) {
      for (int i = 0; i < count; ++i) run([&](const auto& g) { lookahead::detail::plan(g, b, i, b.rows, *scratch); });
      for (int i = 0; i < count; ++i) run([&](const auto& g) { lookahead::detail::pack(g, b, i, b.rows, pack); });
      // The engine takes its rows from the packed batch, as one on a device would.
      Tokens chosen, top;
      for (int i = 0; i < count; ++i) {
        const int first = b.packed.row_offsets[i], rows = b.packed.row_offsets[i + 1] - first;
        if (rows == 0) continue;
        TokenTreeStorage<Token, 24> tree;
        tree.begin(b.packed.context_sizes[i], nullptr, 0);
        const int root = b.sequences[i].tree.root;
        tree.root = root;
        for (int r = 0; r < rows; ++r) {
          tree.add(b.packed.parents[first + r], b.packed.tokens[first + r]);
          REQUIRE(tree.position[r] == b.packed.positions[first + r]);
        }
        for (int k = b.packed.wanted_offsets[i]; k < b.packed.wanted_offsets[i + 1]; ++k)
          tree.want(b.packed.wanted[k] - first);
        engines[at(i)].forward(tree.view());
        for (const int row : tree.view().wanted()) {
          Tokens best(8);
          REQUIRE(engines[at(i)].top_tokens(row, best) == 8);
          chosen.push_back(best[0]);
          top.insert(top.end(), best.begin(), best.end());
        }
      }
      const lookahead::detail::Choices<Token> choices{chosen.data(), top.data(), 8};
      all_ended = true;
      for (int i = 0; i < count; ++i) {
        run([&](const auto& g) { lookahead::detail::resolve(g, b, i, choices, *scratch); });
        const int kept = b.kept.kept[i];
        if (kept > 0)
          (void)engines[at(i)].commit(std::span<const std::int32_t>(b.kept.path + i * b.kept.stride, at(kept)));
        b.ring.read(cursors[at(i)],
                    [&](const auto& r) { texts[at(i)].insert(texts[at(i)].end(), r.tokens, r.tokens + r.count); });
        all_ended = all_ended && !b.sequences[i].active;
      }
    }

    for (int i = 0; i < count; ++i) {
      const Tokens prompt = tokenizer.encode(prompts[at(i)], tokenizer.add_bos());
      LlamaEngine engine(file, {.context = 256, .threads = 1});
      lookahead::Decoder decoder(engine, {.rows = 24, .cost = StepCost::none()});
      Tokens text;
      decoder.generate(prompt, length, [&](Token token) { text.push_back(token); });
      CHECK(tokenizer.decode(texts[at(i)]) == tokenizer.decode(text));
      CHECK(texts[at(i)] == text);
    }
    CHECK(steps < length);
    MESSAGE(length << " tokens of each text in " << steps << " steps");
  }
}
