#include <lookahead/lookahead.hpp>
#include <lookahead/testing/oracle_model.hpp>
#include <span>
#include <vector>

std::vector<int> decode_elsewhere(std::span<const int> prompt, std::size_t count);

/// Decodes with lookahead here and plainly in the other file; returns 0 if the texts are equal.
int main() {
  lookahead::testing::OracleModel<> model({});
  lookahead::Decoder decoder(model);
  const std::vector<int> prompt{1, 2, 3};
  std::vector<int> text;
  decoder.generate(prompt, 50,
                   [&](std::span<const int> block) { text.insert(text.end(), block.begin(), block.end()); });
  return text.size() == 50 && text == decode_elsewhere(prompt, 50) ? 0 : 1;
}
