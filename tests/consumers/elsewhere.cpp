#include <lookahead/lookahead.hpp>
#include <lookahead/testing/oracle_model.hpp>
#include <lookahead/testing/plain_decode.hpp>
#include <span>
#include <vector>

// The headers stand in a second translation unit: what is not inline is defined twice and does not link.
std::vector<int> decode_elsewhere(std::span<const int> prompt, std::size_t count) {
  lookahead::testing::OracleModel<> model({});
  return lookahead::testing::plain_decode(model, prompt, count);
}
