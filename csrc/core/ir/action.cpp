#include "core/ir/action.h"

#include <array>
#include <charconv>
#include <stdexcept>

namespace fold3d::core {
namespace {

constexpr std::array<std::string_view, kNumKinds> kNames = {"F",      "B",      "I",      "W",          "SEND_F",
                                                            "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD"};

[[noreturn]] void reject(std::string_view text, const std::string& why) {
  throw std::invalid_argument(
      "'" + std::string(text) + "' is not an action: " + why +
      ". Write <chunk><kind><micro-batch>, as in 2F0 or 1SEND_F3, with a kind out of F B I W SEND_F "
      "RECV_F SEND_B RECV_B, or <chunk>REDUCE_GRAD without a micro-batch");
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

int parse_number(std::string_view digits, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || digits.size() > 9) {
    reject(text, "'" + std::string(digits) + "' is not a number of at most nine digits");
  }
  return value;
}

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

}  // namespace

std::string_view to_string(Kind kind) { return kNames[static_cast<std::size_t>(kind)]; }

std::string to_string(const Action& action) {
  std::string text = std::to_string(action.chunk);
  text += to_string(action.kind);
  if (action.kind != Kind::kReduce) text += std::to_string(action.micro_batch);
  return text;
}

Action parse_action(std::string_view text) {
  const std::string_view cell = trim(text);
  std::size_t kind_begin = 0;
  while (kind_begin < cell.size() && is_digit(cell[kind_begin])) ++kind_begin;
  std::size_t kind_end = kind_begin;
  while (kind_end < cell.size() && !is_digit(cell[kind_end])) ++kind_end;
  const std::string_view kind_text = cell.substr(kind_begin, kind_end - kind_begin);
  if (kind_begin == 0) reject(text, "it does not begin with the number of a chunk");

  for (int k = 0; k < kNumKinds; ++k) {
    if (kNames[static_cast<std::size_t>(k)] != kind_text) continue;
    Action action{parse_number(cell.substr(0, kind_begin), text), static_cast<Kind>(k), -1};
    const std::string_view number = cell.substr(kind_end);
    if (action.kind == Kind::kReduce) {
      if (!number.empty()) reject(text, "REDUCE_GRAD covers all micro-batches and takes no number");
      return action;
    }
    if (number.empty()) reject(text, "the micro-batch is missing");
    action.micro_batch = parse_number(number, text);
    return action;
  }
  reject(text, "the kind '" + std::string(kind_text) + "' is unknown");
}

bool is_compute(Kind kind) {
  return kind == Kind::kForward || kind == Kind::kBackward || kind == Kind::kBackwardInput ||
         kind == Kind::kBackwardWeight;
}
bool is_send(Kind kind) { return kind == Kind::kSendForward || kind == Kind::kSendBackward; }
bool is_recv(Kind kind) { return kind == Kind::kRecvForward || kind == Kind::kRecvBackward; }

}  // namespace fold3d::core
