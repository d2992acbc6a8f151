#include "engines/gguf_writer.hpp"

#include <cstring>
#include <utility>

namespace lookahead::engines {
namespace {

constexpr std::size_t alignment = 32;  // the format's default

std::size_t aligned(std::size_t n) { return (n + alignment - 1) / alignment * alignment; }

void put_bytes(std::vector<std::byte>& to, std::span<const std::byte> bytes) {
  const std::size_t end = to.size();
  to.resize(end + bytes.size());
  if (!bytes.empty()) std::memcpy(to.data() + end, bytes.data(), bytes.size());
}

template <class T>
void put(std::vector<std::byte>& to, T value) {
  put_bytes(to, std::as_bytes(std::span(&value, 1)));
}

void put_text(std::vector<std::byte>& to, std::string_view text) {
  put(to, std::uint64_t{text.size()});
  put_bytes(to, std::as_bytes(std::span(text)));
}

void put_array(std::vector<std::byte>& to, std::uint32_t type, std::size_t count) {
  put(to, type);
  put(to, std::uint64_t{count});
}

}  // namespace

void GgufWriter::begin(std::string_view key, std::uint32_t type) {
  ++keys_;
  put_text(entries_, key);
  put(entries_, type);
}

void GgufWriter::raw(std::string_view key, std::uint32_t type, std::span<const std::byte> value) {
  begin(key, type);
  put_bytes(entries_, value);
}

void GgufWriter::text(std::string_view key, std::string_view value) {
  begin(key, 8);
  put_text(entries_, value);
}

void GgufWriter::integer(std::string_view key, std::uint32_t value) {
  begin(key, 4);
  put(entries_, value);
}

void GgufWriter::number(std::string_view key, float value) {
  begin(key, 6);
  put(entries_, value);
}

void GgufWriter::flag(std::string_view key, bool value) {
  begin(key, 7);
  put(entries_, std::uint8_t{value});
}

void GgufWriter::texts(std::string_view key, std::span<const std::string> values) {
  begin(key, 9);
  put_array(entries_, 8, values.size());
  for (const std::string& value : values) put_text(entries_, value);
}

void GgufWriter::numbers(std::string_view key, std::span<const float> values) {
  begin(key, 9);
  put_array(entries_, 6, values.size());
  put_bytes(entries_, std::as_bytes(values));
}

void GgufWriter::integers(std::string_view key, std::span<const std::int32_t> values) {
  begin(key, 9);
  put_array(entries_, 5, values.size());
  put_bytes(entries_, std::as_bytes(values));
}

void GgufWriter::tensor(std::string_view name, WeightType type, std::span<const std::size_t> shape,
                        std::vector<std::byte> data) {
  put_text(infos_, name);
  put(infos_, static_cast<std::uint32_t>(shape.size()));
  for (const std::size_t n : shape) put(infos_, std::uint64_t{n});
  put(infos_, static_cast<std::uint32_t>(type));
  put(infos_, std::uint64_t{end_});
  const std::size_t bytes = data.size();
  tensors_.push_back({end_, std::move(data)});
  end_ = aligned(end_ + bytes);
}

std::vector<std::byte> GgufWriter::finish() {
  GgufWriter done = std::exchange(*this, {});
  std::vector<std::byte> image;
  const std::size_t start = aligned(24 + done.entries_.size() + done.infos_.size());
  image.reserve(start + done.end_);
  put_bytes(image, std::as_bytes(std::span("GGUF", 4)));
  put(image, std::uint32_t{3});
  put(image, std::uint64_t{done.tensors_.size()});
  put(image, done.keys_);
  put_bytes(image, done.entries_);
  put_bytes(image, done.infos_);
  image.resize(start + done.end_);
  for (Extent& t : done.tensors_) {
    std::memcpy(image.data() + start + t.offset, t.data.data(), t.data.size());
    t.data = {};  // large models: hold each tensor once
  }
  return image;
}

}  // namespace lookahead::engines
